"""Every scheme of this phase on the shipped model: bits per byte, bytes, output error, speed.

`python phase-06-quantization/experiments/evaluate.py --out my-evaluation` quantizes the 16 linear
layers (not the embedding and the head, as in vLLM), reads text the model never saw, prints the
table and writes `evaluation.json`. `--only NAME` measures some rows and keeps the others of that
file; `--mine FILE[:CLASS]` adds a row for a layer class of yours. The model as shipped is measured
wherever it is missing, since all others are compared with it. One thread, about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # read once, when numpy is imported

import numpy as np  # noqa: E402

from course.files import load_module  # noqa: E402
from course.machine import processor  # noqa: E402
from labkit.modules import sibling  # noqa: E402
from mini_vllm import LLMEngine, SamplingParams  # noqa: E402
from mini_vllm.models.transformer import Transformer  # noqa: E402

awq = sibling(__file__, "awq")
gptq = sibling(__file__, "gptq")
heldout = sibling(__file__, "heldout")
schemes = sibling(__file__, "schemes")

HERE = Path(__file__).resolve().parent


SCHEMES: dict[str, schemes.Scheme] = {
    "16 bits, as shipped": schemes.unquantized,
    "int8 per tensor": schemes.int8_tensor,
    "int8 per channel": schemes.int8_channel,
    "FP8 per tensor": schemes.fp8_weight_only,
    "int4 per channel": schemes.int4_groups(-1),
    "int4 g128": schemes.int4_groups(128),
    "int4 g64": schemes.int4_groups(64),
    "int4 g32": schemes.int4_groups(32),
    "int4 g16": schemes.int4_groups(16),
    "int4 g128, 16 codes": schemes.int4_of(schemes.uint4b8, 128, 0),
    "int4 g128, zero-points": schemes.int4_of(schemes.uint4_zero_points, 128, 4),
    "int4 g128, GPTQ": gptq.scheme(128),
    "int4 g128, AWQ": awq.scheme(128),
    "W8A8 static": schemes.w8a8_static,
    "W8A8 static, smoothed": schemes.smoothed(schemes.w8a8_static),
    "W8A8 per token": schemes.w8a8_dynamic,
    "W8A8 per token, smoothed": schemes.smoothed(schemes.w8a8_dynamic),
    "FP8 W8A8 per token": schemes.fp8_w8a8,
}
PLANTED = (
    "16 bits, as shipped", "int8 per channel", "int4 g128", "int4 g128, GPTQ", "int4 g128, AWQ",
    "W8A8 static", "W8A8 static, smoothed", "W8A8 per token", "W8A8 per token, smoothed",
    "FP8 W8A8 per token",
)  # fmt: skip
"""Measured again on a model with outlier channels; see `heldout.plant`."""
BYTES_PER_FILE = 4096
CALIBRATION_FILES = 20
BASE = "16 bits, as shipped"


def inputs_of(model: Transformer, texts: list[bytes]) -> dict[str, schemes.Inputs]:
    """What calibration on `texts` knows of each linear layer."""
    return {
        name: schemes.Inputs(x, name.split(".")[-1] in heldout.FOLDABLE)
        for name, x in heldout.capture(model, texts).items()
    }


def quantize(
    model: Transformer, scheme: schemes.Scheme, inputs: Mapping[str, schemes.Inputs]
) -> dict[str, schemes.Stored]:
    """Every linear layer of `model` by `scheme`, the model left as it is."""
    return {
        name: scheme(heldout.weight_of(getattr(layer, attribute)), inputs[name])
        for name, (layer, attribute) in heldout.linear_layers(model).items()
    }


def install(model: Transformer, make: Callable[[str], Any]) -> Transformer:
    """Replace each linear layer by `make(name)`."""
    for name, (layer, attribute) in heldout.linear_layers(model).items():
        setattr(layer, attribute, make(name))
    return model


def output_errors(
    exact: Transformer, quantized: Transformer, sample: Mapping[str, schemes.Inputs]
) -> dict[str, float]:
    """Relative error of each layer's output on the exact model's inputs to it."""
    found = {}
    for name, (layer, attribute) in heldout.linear_layers(exact).items():
        other = heldout.linear_layers(quantized)[name][0]
        x = sample[name].sample
        want = getattr(layer, attribute)(x)
        error = np.linalg.norm(getattr(other, attribute)(x) - want) / np.linalg.norm(want)
        found[name] = round(float(error), 6)
    return found


def input_facts(x: np.ndarray) -> dict[str, float]:
    """How hard a layer's inputs [num_tokens, in_features] are to hold in int8.

    Returns:
        `channel` and `token`: the loudest of each over the median; `zeros`: share of codes that
        are 0 under one scale; `one_scale`, `token_scales`, `channel_scales`: relative errors.
    """
    size = np.abs(x)
    columns, rows = size.max(axis=0), size.max(axis=1, keepdims=True)
    scales = {"one_scale": size.max(), "token_scales": rows, "channel_scales": columns}
    facts = {
        "channel": columns.max() / np.median(columns),
        "token": rows.max() / np.median(rows),
        "zeros": np.mean(np.rint(x / (size.max() / 127)) == 0),
    }
    for name, largest in scales.items():
        step = np.maximum(largest, 1e-12) / 127
        facts[name] = np.linalg.norm(np.rint(x / step) * step - x) / np.linalg.norm(x)
    return {name: round(float(value), 4) for name, value in facts.items()}


def tokens_per_second(model: Transformer, repeats: int = 3) -> float:
    """Median over runs: 8 requests of 32 greedy tokens each, all at once."""
    words = ("When", "If", "As", "Since", "While", "Once", "Before", "After")
    prompts = [f"{word} the scheduler" for word in words]
    times = []
    for _ in range(repeats):
        engine = LLMEngine(model=model)
        began = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
        times.append(time.perf_counter() - began)
    return 8 * 32 / statistics.median(times)


def interval(
    bits: Mapping[str, float], base: Mapping[str, float], sizes: Mapping[str, int], seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference in bits per byte and its 95 % bootstrap interval over files.

    Both models read the same files, so the difference is taken file by file before anything is
    resampled: what makes a file hard is in both and cancels.
    """
    names = sorted(sizes)
    change = np.array([bits[name] - base[name] for name in names])
    size = np.array([sizes[name] for name in names], dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(names), (4000, len(names)))
    means = change[draws].sum(axis=1) / size[draws].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(change.sum() / size.sum()), float(low), float(high)


def measure_row(
    make: Callable[[], Transformer],
    scheme: schemes.Scheme,
    calibration: Mapping[str, schemes.Inputs],
    sample: Mapping[str, schemes.Inputs],
    texts: Mapping[str, bytes],
    speed: bool = True,
) -> dict[str, Any]:
    """One scheme: bits per file, bytes, errors, speed."""
    exact = make()
    stored = quantize(exact, scheme, calibration)
    cached = install(make(), lambda name: schemes.Layer(stored[name], cached=True))
    row: dict[str, Any] = {
        "bits": {name: round(heldout.bits_of(cached, text), 3) for name, text in texts.items()},
        "weight_bytes": sum(layer.weight_bytes for layer in stored.values()),
        "scale_bytes": sum(layer.scale_bytes for layer in stored.values()),
        "output_errors": output_errors(exact, cached, sample),
    }
    if speed:
        decoding = install(make(), lambda name: schemes.Layer(stored[name]))
        row["tokens_per_second"] = round(tokens_per_second(decoding))
    return row


def layer_class(argument: str) -> tuple[str, Any]:
    """`FILE[:CLASS]` as the name of a row and a class; the class defaults to `Linear`.

    Raises:
        ValueError: no such file, no such class, or a class that is not written yet.
    """
    path, _, name = argument.partition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {path}")
    layer = getattr(load_module(file), name or "Linear", None)
    if layer is None:
        raise ValueError(f"{path} defines no {name or 'Linear'}; name your class as FILE:CLASS")
    try:
        layer(np.eye(256, dtype=np.float32), None)(np.ones((1, 256), np.float32))
    except NotImplementedError:
        raise ValueError(f"{path}: {layer.__name__} is not written yet") from None
    folder = "-".join(file.parent.name.split("-")[:2])
    return f"yours, {name or folder}"[:24], layer


def scheme_of(layer: Any) -> schemes.Scheme:
    """A class called as the engine calls `Linear`: its bytes are those of the arrays it holds."""

    def scheme(weight: np.ndarray, inputs: schemes.Inputs) -> schemes.Stored:
        built = layer(weight, None)
        held = [value for value in vars(built).values() if isinstance(value, np.ndarray)]
        total = sum(array.nbytes for array in held)
        largest = max((array.nbytes for array in held), default=0)
        return schemes.Stored(lambda: weight, total, total - largest, call=built)

    return scheme


def other_bytes() -> int:
    """Embedding and norms at two bytes each; the head is the embedding."""
    model = heldout.model()
    linears = sum(
        getattr(layer, attribute).weight.size
        for layer, attribute in heldout.linear_layers(model).values()
    )
    return 2 * (sum(array.size for array in heldout.weights()[1].values()) - linears)


def table(saved: Mapping[str, Any], part: str = "rows") -> str:
    """The rows as text; differences are in thousandths of a bit per byte."""
    rows, sizes = saved[part], saved["text"]["sizes"]
    total = sum(sizes.values())
    head = (
        f"{'':<24}{'bits/byte':>10}{'change':>8}{'95 % interval':>17}{'linears':>11}"
        f"{'scales':>9}{'error':>8}{'worst':>7}{'tok/s':>6}"
    )
    lines = [head]
    for name, row in rows.items():
        change, low, high = interval(row["bits"], rows[BASE]["bits"], sizes)
        errors = list(row["output_errors"].values())
        speed = f"{row['tokens_per_second']:.0f}" if "tokens_per_second" in row else "-"
        known = name == BASE
        lines.append(
            f"{name:<24}{sum(row['bits'].values()) / total:>10.4f}"
            f"{'-' if known else f'{1000 * change:+.1f}':>8}"
            f"{'-' if known else f'{1000 * low:+.1f} to {1000 * high:+.1f}':>17}"
            f"{row['weight_bytes']:>11,}{row['scale_bytes']:>9,}"
            f"{sum(errors) / len(errors):>8.4f}{max(errors):>7.4f}{speed:>6}"
        )
    return "\n".join(lines)


def new_results(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What a file of results says besides its rows."""
    return {
        "machine": processor(),
        "threads": 1,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "model": "byte-llama",
        "dtype": "float32",
        "text": {
            "what": "held-out files of the Python standard library, docstrings and help() topics",
            "bytes_per_file": BYTES_PER_FILE,
            "context": heldout.CONTEXT,
            "sizes": {name: len(text) for name, text in files.items()},
        },
        "other_bytes": other_bytes(),
        "inputs": {},
        "rows": {},
        "planted": {},
    }


def main(argv: list[str] | None = None) -> int:
    """Measure what is asked, print the tables, write the file."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for evaluation.json")
    parser.add_argument("--only", action="append", choices=[*SCHEMES, "planted"], default=[])
    parser.add_argument("--mine", action="append", default=[], metavar="FILE[:CLASS]")
    args = parser.parse_args(argv)
    everything = not (args.only or args.mine)
    wanted = {name: s for name, s in SCHEMES.items() if everything or name in args.only}
    for argument in args.mine:
        try:
            name, layer = layer_class(argument)
        except ValueError as error:
            parser.error(f"--mine {argument}: {error}")
        wanted[name] = scheme_of(layer)
    files = {name: text[:BYTES_PER_FILE] for name, text in heldout.library(True).items()}
    path = args.out / "evaluation.json"
    fresh = new_results(files)
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else fresh
    if saved["text"] != fresh["text"]:
        parser.error(f"{path}: measured on other text; give another --out")
    if BASE not in saved["rows"]:
        wanted = {BASE: SCHEMES[BASE], **wanted}
    calibration_texts = list(heldout.library(False, 2 * CALIBRATION_FILES).values())[::2]
    calibration = inputs_of(heldout.model(), calibration_texts)
    longest = sorted(files.values(), key=len)[-8:]
    sample = inputs_of(heldout.model(), longest)
    saved["inputs"] = {name: input_facts(known.sample) for name, known in calibration.items()}
    args.out.mkdir(parents=True, exist_ok=True)

    def keep(part: str, name: str, row: dict[str, Any]) -> None:
        saved[part][name] = row
        order = {known: number for number, known in enumerate(SCHEMES)}
        saved[part] = dict(sorted(saved[part].items(), key=lambda kv: order.get(kv[0], 99)))
        path.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")

    for name, scheme in wanted.items():
        keep("rows", name, measure_row(heldout.model, scheme, calibration, sample, files))
        print(name, flush=True)
    if "planted" in args.only or everything:
        calibration, sample = (
            inputs_of(heldout.plant(heldout.model()), texts)
            for texts in (calibration_texts, longest)
        )
        for name in PLANTED:
            row = measure_row(
                lambda: heldout.plant(heldout.model()),
                SCHEMES[name],
                calibration,
                sample,
                files,
                False,
            )
            keep("planted", name, row)
            print("planted:", name, flush=True)
    for part in ("rows", "planted"):
        if BASE in saved[part]:
            print(f"\n{table(saved, part)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
