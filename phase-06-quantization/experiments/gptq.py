"""GPTQ in a page: quantize one input column at a time and let the later ones make up for it.

`python phase-06-quantization/experiments/gptq.py --out FOLDER` compares it with rounding to nearest
on the shipped model's real inputs, prints a table and writes `gptq.json`. The method is that of
arXiv:2210.17323; vLLM only loads its results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from labkit.modules import sibling

heldout = sibling(__file__, "heldout")
schemes = sibling(__file__, "schemes")


HERE = Path(__file__).resolve().parent


def hessian(x: np.ndarray, damp: float = 0.01) -> np.ndarray:
    """Curvature of the output error: `2 X^T X / n` plus `damp` times the mean of its diagonal.

    Args:
        x: inputs of the layer [num_tokens, in_features].
        damp: share of the mean that is added, so that the matrix can be inverted.

    Returns:
        float64 [in_features, in_features], the same for every output.
    """
    x = x.astype(np.float64)
    h = 2 * x.T @ x / len(x)
    h[np.diag_indices_from(h)] += damp * max(float(np.diag(h).mean()), 1e-12)
    return h


def gptq(weight: np.ndarray, h: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of lab 06-03's kind, chosen for the output instead of for the weight.

    Args:
        weight: [out_features, in_features].
        h: `hessian` of the layer's inputs.
        group_size: inputs per scale; divides in_features.

    Returns:
        `(q, scales)`: int8 codes -7..7 and float16 [out_features, num_groups].
    """
    w = weight.astype(np.float64)  # a copy: columns are corrected as we go
    u = np.linalg.cholesky(np.linalg.inv(h)).T  # upper: row j is what column j does to the rest
    q = np.empty(w.shape, dtype=np.int8)
    scales = np.empty((len(w), w.shape[1] // group_size), dtype=np.float16)
    for j in range(w.shape[1]):
        if j % group_size == 0:  # the group's scale, from its weights as corrected so far
            largest = np.abs(w[:, j : j + group_size]).max(axis=1)
            scales[:, j // group_size] = np.where(largest > 0, largest / 7, 1)
        scale = scales[:, j // group_size].astype(np.float64)
        q[:, j] = np.clip(np.rint(w[:, j] / scale), -7, 7)
        error = (w[:, j] - q[:, j] * scale) / u[j, j]
        w[:, j + 1 :] -= np.outer(error, u[j, j + 1 :])
    return q, scales


def scheme(group_size: int) -> schemes.Scheme:
    """GPTQ as a row of the evaluation."""

    def made(weight: np.ndarray, inputs: schemes.Inputs) -> schemes.Stored:
        q, scales = gptq(weight, hessian(inputs.sample), group_size)
        return schemes.int4_stored(q, scales, group_size)

    return made


GROUP_SIZE = 128


def compare() -> dict[str, dict[str, float]]:
    """Errors of both methods on each layer of the shipped model.

    Returns:
        Per layer, relative errors of the weight (`weight`, `gptq_weight`) and of the output on
        text that calibration did not see (`output`, `gptq_output`), and of GPTQ on its own
        calibration inputs (`gptq_seen`).
    """
    model = heldout.model()
    calibration = heldout.capture(model, list(heldout.library(False, 40).values())[::2])
    longest = sorted(heldout.library(True).values(), key=len)[-8:]
    fresh = heldout.capture(model, longest)
    rows = {}
    for name, (layer, attribute) in heldout.linear_layers(model).items():
        weight = heldout.weight_of(getattr(layer, attribute))
        inputs = schemes.Inputs(calibration[name], False)
        nearest = schemes.int4_groups(GROUP_SIZE)(weight, inputs).decode()
        ours = scheme(GROUP_SIZE)(weight, inputs).decode()

        def error(back: np.ndarray, x: np.ndarray, weight: np.ndarray = weight) -> float:
            return rel(x @ back.T, x @ weight.T)

        rows[name] = {
            "weight": rel(nearest, weight),
            "gptq_weight": rel(ours, weight),
            "output": error(nearest, fresh[name]),
            "gptq_output": error(ours, fresh[name]),
            "gptq_seen": error(ours, calibration[name]),
        }
    return rows


def rel(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the error over norm of the exact one."""
    return round(float(np.linalg.norm(a - b) / np.linalg.norm(b)), 6)


def table(rows: dict[str, dict[str, float]]) -> str:
    """The layers as text."""
    lines = [f"{'':<22}{'weight':>8}{'GPTQ':>8}{'output':>9}{'GPTQ':>8}{'on calibration':>16}"]
    for name, row in rows.items():
        lines.append(
            f"{name:<22}{row['weight']:>8.3f}{row['gptq_weight']:>8.3f}{row['output']:>9.3f}"
            f"{row['gptq_output']:>8.3f}{row['gptq_seen']:>16.3f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gptq.json")
    args = parser.parse_args(argv)
    rows = compare()
    args.out.mkdir(parents=True, exist_ok=True)
    saved = {"model": "byte-llama", "group_size": GROUP_SIZE, "layers": rows}
    (args.out / "gptq.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
