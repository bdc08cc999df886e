"""Static and dynamic activation scales when the inputs are not those of calibration.

`python phase-06-quantization/studies/drift.py` shifts made inputs in loudness and place, and runs
the shipped model on five texts with scales from one of them. It prints tables and writes
`drift.json` into `--out`. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit.modules import sibling

common = sibling(__file__, "study_tools")


SHIFTS = tuple(2.0**k for k in range(-6, 7))
MODES = ("static", "static 99.9 %", "static x2", "dynamic tensor", "dynamic token")
CALIBRATION = "prose"


def codes_times(X: np.ndarray, scale: Any) -> np.ndarray:
    """int8 codes times `scale`; what lies outside is clipped, as a given scale requires."""
    return np.clip(np.rint(X / scale), -127, 127) * scale


def token_scales(X: np.ndarray) -> np.ndarray:
    """[tokens, 1]: each token's own maximum over 127, 1 for a token of zeros."""
    scale = np.abs(X).max(axis=1, keepdims=True) / 127
    return np.where(scale > 0, scale, 1.0)


def row_quantized(W: np.ndarray) -> np.ndarray:
    """W as int8 with a scale per output row says it."""
    return codes_times(W, token_scales(W))


# ------------------------------------------------------------------ made inputs


def loudness(seed: int = 0) -> list[dict[str, float]]:
    """Output error over a factor on the whole input: the scale of calibration, and each batch's."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((128, 256))
    calibrated = np.abs(rng.standard_normal((512, 256))).max() / 127
    X = rng.standard_normal((64, 256))
    W_hat = row_quantized(W)
    found = []
    for factor in SHIFTS:
        moved, exact = X * factor, (X * factor) @ W.T
        static = codes_times(moved, calibrated)
        dynamic = codes_times(moved, np.abs(moved).max() / 127)
        found.append(
            {
                "factor": factor,
                "static": common.relative(static @ W_hat.T, exact),
                "dynamic": common.relative(dynamic @ W_hat.T, exact),
                "clipped": float((np.abs(moved) > 127.5 * calibrated).mean()),
            }
        )
    return found


def one_loud_token(seed: int = 0, times: float = 50.0) -> dict[str, dict[str, float]]:
    """One token of 64 is loud. Error of the quiet tokens and of the loud one, by kind of scale."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((128, 256))
    calibrated = np.abs(rng.standard_normal((512, 256))).max() / 127
    X = rng.standard_normal((64, 256))
    X[9] *= times
    exact, W_hat = X @ W.T, row_quantized(W)
    scales = {
        "static": calibrated,
        "dynamic tensor": np.abs(X).max() / 127,
        "dynamic token": token_scales(X),
    }
    quiet = np.arange(64) != 9
    found = {}
    for name, scale in scales.items():
        got = codes_times(X, scale) @ W_hat.T
        found[name] = {
            "total": common.relative(got, exact),
            "quiet tokens": common.relative(got[quiet], exact[quiet]),
            "loud token": common.relative(got[9], exact[9]),
        }
    return found


def moved_channels(seeds: int = 20) -> dict[str, Any]:
    """SmoothQuant's s from channels 17 and 101, used where others are loud: mean over seeds."""
    rows: dict[str, list[tuple[float, float]]] = {"same channels": [], "moved channels": []}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        X, W = rng.standard_normal((64, 256)), rng.standard_normal((128, 256))
        X[:, [17, 101]] *= 80
        s = np.sqrt(np.abs(X).max(axis=0) / np.abs(W).max(axis=0))
        for name, channels in (("same channels", [17, 101]), ("moved channels", [5, 200])):
            fresh = rng.standard_normal((64, 256))
            fresh[:, channels] *= 80
            exact = fresh @ W.T
            raw = per_tensor(fresh) @ per_tensor(W).T
            smoothed = per_tensor(fresh / s) @ per_tensor(W * s).T
            rows[name].append((common.relative(raw, exact), common.relative(smoothed, exact)))
    return {
        name: {
            "raw": float(np.mean([r for r, _ in pairs])),
            "smoothed": float(np.mean([s for _, s in pairs])),
            "worse": sum(s > r for r, s in pairs),
            "seeds": seeds,
        }
        for name, pairs in rows.items()
    }


def per_tensor(X: np.ndarray) -> np.ndarray:
    """X as int8 with one scale says it."""
    return codes_times(X, np.abs(X).max() / 127)


# ------------------------------------------------------------------ the shipped model


class Quantized:
    """A linear layer of int8 weights, a scale per row, and int8 activations of one of `MODES`."""

    def __init__(self, weight: np.ndarray, mode: str, static: float) -> None:
        self.weight, self.mode, self.static = row_quantized(weight).T, mode, static
        self.clipped = 0.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if self.mode == "dynamic token":
            scale: Any = token_scales(x)
        elif self.mode == "dynamic tensor":
            scale = np.abs(x).max() / 127
        else:
            scale = self.static
        self.clipped = float((np.abs(x) > 127.5 * scale).mean())
        return codes_times(x, scale) @ self.weight


def calibrate(name: str) -> dict[str, dict[str, float]]:
    """Per layer and static mode the scale that a text asks for."""
    listener = common.Listener()
    common.logits_of(common.model_of(listener), common.text_of(name))
    found = {}
    for layer, X in listener.inputs().items():
        top = float(np.abs(X).max())
        found[layer] = {
            "static": top / 127,
            "static x2": 2 * top / 127,
            "static 99.9 %": float(np.quantile(np.abs(X), 0.999)) / 127,
        }
    return found


def quantized_run(
    mode: str, scales: dict[str, dict[str, float]], tokens: list[int], exact: np.ndarray
) -> dict[str, float]:
    """Bits per byte, divergence from the exact model, share clipped in the most clipped layer."""
    names, layers = iter(common.LAYERS), []

    def linear(weight: np.ndarray, bias: np.ndarray | None, _full_name: str) -> Any:
        name = next(names)
        if name == "lm_head":  # stays as it is, as in every scheme of the phase
            return common.Linear(weight, bias)
        layers.append(Quantized(weight, mode, scales[name].get(mode, 1.0)))
        return layers[-1]

    logits = common.logits_of(common.model_of(linear), tokens)
    return {
        "bits": common.bits_per_byte(logits, tokens),
        "divergence": common.divergence(exact, logits),
        "clipped": max(layer.clipped for layer in layers),
    }


def texts(names: Sequence[str] = common.TEXTS) -> dict[str, Any]:
    """Every text under every mode, with scales from `CALIBRATION`."""
    scales = calibrate(CALIBRATION)
    found: dict[str, Any] = {}
    for name in names:
        own = calibrate(name)
        ratios = {n: own[n]["static"] / scales[n]["static"] for n in scales}
        loudest = max(ratios, key=lambda n: ratios[n])
        tokens = common.text_of(name)
        exact = common.logits_of(common.model_of(), tokens)
        found[name] = {
            "exact": common.bits_per_byte(exact, tokens),
            "loudest layer": loudest,
            "its maximum over calibration's": ratios[loudest],
            **{mode: quantized_run(mode, scales, tokens, exact) for mode in MODES},
        }
    return found


def table(saved: dict[str, Any]) -> str:
    """The tables of the page."""
    lines = ["made inputs, times a factor: error of the output, and share of inputs clipped"]
    for row in saved["loudness"]:
        lines.append(
            f"  x {row['factor']:<9g} static {row['static']:.3f}   dynamic {row['dynamic']:.3f}   "
            f"clipped {row['clipped']:.1%}"
        )
    lines.append("one token of 64 is 50 times as loud")
    for name, row in saved["loud token"].items():
        lines.append(
            f"  {name:<15} total {row['total']:.3f}   quiet tokens {row['quiet tokens']:.3f}   "
            f"loud token {row['loud token']:.3f}"
        )
    lines.append("s of SmoothQuant from one batch, used on another; mean over seeds")
    for name, row in saved["moved"].items():
        lines.append(
            f"  {name:<15} raw {row['raw']:.3f}   smoothed {row['smoothed']:.3f}   "
            f"worse than raw in {row['worse']} of {row['seeds']}"
        )
    lines.append(f"the shipped model, W8A8, scales from the text {CALIBRATION!r}")
    lines.append("bits per byte of the exact model; divergence from it in bits per byte")
    lines.append(f"  {'text':<8} {'exact':>6} " + "".join(f"{mode:>16}" for mode in MODES))
    for name, row in saved["texts"].items():
        cells = "".join(f"{row[mode]['divergence']:>16.4f}" for mode in MODES)
        lines.append(f"  {name:<8} {row['exact']:>6.3f} {cells}")
    lines.append("  the most clipped layer, static; the loudest layer against calibration")
    for name, row in saved["texts"].items():
        lines.append(
            f"  {name:<8} {row['static']['clipped']:.3%} clipped   {row['loudest layer']} "
            f"x {row['its maximum over calibration' + chr(39) + 's']:.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Activation scales under drift.")
    parser.add_argument("--texts", nargs="+", default=list(common.TEXTS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("my-studies"))
    arguments = parser.parse_args(argv)
    saved = common.rounded(
        {
            "loudness": loudness(),
            "loud token": one_loud_token(),
            "moved": moved_channels(arguments.seeds),
            "texts": texts(arguments.texts),
        }
    )
    common.write(saved, arguments.out, "drift.json")
    print(table(saved))


if __name__ == "__main__":
    main()
