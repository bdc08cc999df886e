"""Where one number over a whole tensor says "fine" and part of the tensor is gone.

`python phase-06-quantization/studies/metric_trap.py` makes one row loud, then two channels loud,
and then looks at the shipped model's own tensors in int4 with one scale each. It prints tables and
writes `metric-trap.json` into `--out`. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit.modules import sibling

common = sibling(__file__, "study_tools")


LOUDNESS = (1, 2, 5, 10, 20, 40, 80, 160, 300, 1000)
TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.3.mlp.gate_proj.weight",
    "model.layers.3.mlp.up_proj.weight",
    "model.layers.3.mlp.down_proj.weight",
    "model.layers.3.self_attn.o_proj.weight",
)


def one_scale(W: np.ndarray, largest: int = 127) -> np.ndarray:
    """W on a grid with one scale: codes times scale."""
    scale = float(np.abs(W).max()) / largest
    return np.rint(W / scale) * scale if scale else W.copy()


def row_errors(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Relative error of each row; 0 for a row of zeros."""
    size = np.linalg.norm(exact, axis=1)
    return np.linalg.norm(got - exact, axis=1) / np.where(size > 0, size, 1)


def loud_row(seed: int = 0) -> list[dict[str, float]]:
    """64 rows of weights, one of them louder: error of all, and of the other 63."""
    found = []
    for times in LOUDNESS:
        W = np.random.default_rng(seed).standard_normal((64, 256))
        W[5] *= times
        got, others = one_scale(W), np.arange(64) != 5
        found.append(
            {
                "times": times,
                "whole": common.relative(got, W),
                "others": common.relative(got[others], W[others]),
                "zero rows": int((got == 0).all(axis=1).sum()),
            }
        )
    return found


def loud_channels(seed: int = 0) -> list[dict[str, float]]:
    """Lab 06-04's setup: error of X @ W.T, and of the quiet channels' part of it."""
    quiet = np.setdiff1d(np.arange(256), (17, 101))
    found = []
    for times in LOUDNESS:
        rng = np.random.default_rng(seed)
        X, W = rng.standard_normal((64, 256)), rng.standard_normal((128, 256))
        X[:, [17, 101]] *= times
        X_hat, W_hat = one_scale(X), one_scale(W)
        part = X[:, quiet] @ W[:, quiet].T
        step = np.abs(X).max() / 127
        found.append(
            {
                "times": times,
                "whole": common.relative(X_hat @ W_hat.T, X @ W.T),
                "quiet": common.relative(X_hat[:, quiet] @ W_hat[:, quiet].T, part),
                "codes": len(np.unique(np.rint(X[:, quiet] / step))),
            }
        )
    return found


def real_tensors(texts: Sequence[str]) -> list[dict[str, Any]]:
    """int4 with one scale on one tensor of the shipped model at a time: norms, rows, and loss."""
    weights = common.checkpoint().weights
    tokens = {name: common.text_of(name) for name in texts}
    exact = {name: common.logits_of(common.model_of(), ids) for name, ids in tokens.items()}
    used = np.zeros(257, dtype=bool)
    used[sorted({token for ids in tokens.values() for token in ids})] = True
    found = []
    for name in TENSORS:
        W = weights[name]
        got = one_scale(W, 7).astype(np.float32)
        model = common.model_of(weights={**weights, name: got})
        errors = row_errors(got, W)
        row = {
            "tensor": name.removeprefix("model.").removesuffix(".weight"),
            "whole": common.relative(got, W),
            "median row": float(np.median(errors)),
            "worst row": float(errors.max()),
            "zero rows": int((got == 0).all(axis=1).sum()),
            "rows": len(W),
            "divergence": {
                text: common.divergence(exact[text], common.logits_of(model, ids))
                for text, ids in tokens.items()
            },
        }
        if len(W) == len(used):
            row["rows of bytes in these texts"] = common.relative(got[used], W[used])
            row["rows of all other bytes"] = common.relative(got[~used], W[~used])
            row["size of those rows"] = [
                float(np.linalg.norm(W[mask], axis=1).mean()) for mask in (used, ~used)
            ]
        found.append(row)
    return found


def table(saved: dict[str, Any]) -> str:
    """The tables of the page."""
    lines = ["one row of 64 is louder; int8, one scale"]
    for row in saved["row"]:
        lines.append(
            f"  x {row['times']:<5} whole matrix {row['whole']:.4f}   the other rows "
            f"{row['others']:.3f}   rows of zeros {row['zero rows']}"
        )
    lines.append("two channels of 256 are louder; W8A8, one scale each")
    for row in saved["channels"]:
        lines.append(
            f"  x {row['times']:<5} whole product {row['whole']:.4f}   quiet channels "
            f"{row['quiet']:.3f}   codes they use {row['codes']}"
        )
    lines.append(f"the shipped model, one tensor in int4 with one scale; texts {saved['texts']}")
    lines.append("  whole  median row  worst row  rows of zeros  divergence, bits per byte")
    for row in saved["tensors"]:
        lost = float(np.mean(list(row["divergence"].values())))
        lines.append(
            f"  {row['whole']:.3f}  {row['median row']:10.3f}  {row['worst row']:9.3f}  "
            f"{row['zero rows']:3d} of {row['rows']:3d}     {lost:6.3f}   {row['tensor']}"
        )
    first = saved["tensors"][0]
    sizes = first["size of those rows"]
    lines.append(
        f"{first['tensor']}: rows of bytes in these texts, norm {sizes[0]:.2f}, error "
        f"{first['rows of bytes in these texts']:.3f}; other rows, norm {sizes[1]:.2f}, error "
        f"{first['rows of all other bytes']:.3f}"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Errors that a norm hides.")
    parser.add_argument("--texts", nargs="+", default=["prose", "code"])
    parser.add_argument("--out", type=Path, default=Path("my-studies"))
    arguments = parser.parse_args(argv)
    saved = common.rounded(
        {
            "row": loud_row(),
            "channels": loud_channels(),
            "texts": arguments.texts,
            "tensors": real_tensors(arguments.texts),
        }
    )
    common.write(saved, arguments.out, "metric-trap.json")
    print(table(saved))


if __name__ == "__main__":
    main()
