"""The search of AWQ in a page: make the input channels that carry most weigh more before rounding.

`python phase-06-quantization/experiments/awq.py --out FOLDER` runs it on the shipped model's real
inputs, prints a table and writes `awq.json`. The method is that of arXiv:2306.00978; vLLM only
loads its results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from labkit.modules import sibling
from mini_vllm.models.transformer import Transformer

heldout = sibling(__file__, "heldout")
schemes = sibling(__file__, "schemes")

HERE = Path(__file__).resolve().parent


ALPHAS = tuple(step / 20 for step in range(21))


def factors(x: np.ndarray, alpha: float) -> np.ndarray:
    """`mean|x_j| ** alpha`, spread evenly around 1; dead channels get 1. [in_features], float32."""
    s = np.maximum(np.abs(x).mean(axis=0), 1e-8).astype(np.float64) ** alpha
    s /= np.sqrt(s.max() * s.min())
    return np.where(np.abs(x).max(axis=0) > 0, s, 1).astype(np.float32)


def errors(
    weight: np.ndarray, calibration: np.ndarray, x: np.ndarray, group_size: int
) -> list[float]:
    """Relative output error on `x` for each of `ALPHAS`; the first is rounding to nearest.

    The factors come from `calibration`; both are [num_tokens, in_features].
    """
    exact = x @ weight.T
    found = []
    for alpha in ALPHAS:
        s = factors(calibration, alpha)
        back = schemes.int4_groups(group_size)(weight * s, schemes.Inputs(x, True)).decode()
        error = np.linalg.norm((x / s) @ back.T - exact) / np.linalg.norm(exact)
        found.append(round(float(error), 6))
    return found


def scheme(group_size: int) -> schemes.Scheme:
    """AWQ as a row of the evaluation; plain rounding where the factor cannot be folded."""

    def made(weight: np.ndarray, inputs: schemes.Inputs) -> schemes.Stored:
        plain = schemes.int4_groups(group_size)
        if not inputs.foldable:
            return plain(weight, inputs)
        found = errors(weight, inputs.sample, inputs.sample, group_size)
        alpha = ALPHAS[int(np.argmin(found))]
        s = factors(inputs.sample, alpha)
        stored = plain(weight * s, inputs)

        def divided(x: np.ndarray) -> np.ndarray:
            return x / s.astype(x.dtype)

        return schemes.Stored(stored.decode, stored.weight_bytes, stored.scale_bytes, divided)

    return made


GROUP_SIZE = 128


def search(make: Callable[[], Transformer] = heldout.model) -> dict[str, dict[str, list[float]]]:
    """The error over alpha of each layer whose factor can be folded.

    Returns:
        Per layer, one error per entry of `ALPHAS`: `seen` on the calibration inputs, which
        decides, and `fresh` on text it did not see.
    """
    model = make()
    calibration = heldout.capture(model, list(heldout.library(False, 40).values())[::2])
    longest = sorted(heldout.library(True).values(), key=len)[-8:]
    fresh = heldout.capture(model, longest)
    rows = {}
    for name, (layer, attribute) in heldout.linear_layers(model).items():
        if attribute not in heldout.FOLDABLE:
            continue
        weight = heldout.weight_of(getattr(layer, attribute))
        seen = calibration[name]
        rows[name] = {
            "seen": errors(weight, seen, seen, GROUP_SIZE),
            "fresh": errors(weight, seen, fresh[name], GROUP_SIZE),
        }
    return rows


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    """Per layer: the exponent chosen, and the errors without and with it on fresh text."""
    lines = [f"{'':<22}{'alpha':>6}{'nearest':>9}{'AWQ':>8}{'alpha 1':>9}"]
    for name, row in rows.items():
        best = int(np.argmin(row["seen"]))
        fresh = row["fresh"]
        lines.append(
            f"{name:<22}{ALPHAS[best]:>6.2f}{fresh[0]:>9.4f}{fresh[best]:>8.4f}{fresh[-1]:>9.4f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Search on the model as shipped and with planted outliers; print, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for awq.json")
    args = parser.parse_args(argv)
    saved: dict[str, Any] = {"model": "byte-llama", "group_size": GROUP_SIZE, "alphas": ALPHAS}
    saved["layers"] = search()
    saved["planted"] = search(lambda: heldout.plant(heldout.model()))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "awq.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    print(f"as shipped\n{table(saved['layers'])}\nplanted\n{table(saved['planted'])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
