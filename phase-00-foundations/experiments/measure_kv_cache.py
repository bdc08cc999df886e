"""What the KV cache saves on real floats: tokens, FLOP and seconds with and without it.

`python phase-00-foundations/experiments/measure_kv_cache.py` generates with the shipped model both
ways, checks that the tokens are equal, prints a table and writes `kv-cache.json` and
`kv-cache.svg` into `--out`. FLOP are counted where they are spent, by wrapping the engine's linear
layers and its attention. Seconds are this machine's, on one thread: the matrices are too small for
a second one to help much.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # read once, when numpy is imported

import numpy as np  # noqa: E402

from course.machine import describe  # noqa: E402
from course.truth.figures import BLUE, ORANGE, Svg  # noqa: E402
from course.truth.plots import Axes, written  # noqa: E402
from mini_vllm import EngineParts, LLMEngine  # noqa: E402
from mini_vllm.attention import paged_attention  # noqa: E402
from mini_vllm.batch import ForwardBatch, Model  # noqa: E402
from mini_vllm.config import SamplingParams  # noqa: E402
from mini_vllm.models.transformer import Linear  # noqa: E402

HERE = Path(__file__).resolve().parent


PROMPT = "The KV cache stores the keys and values of every token computed so far, "


@dataclass(slots=True)
class Meter:
    """FLOP counted so far, multiplications and additions each as one."""

    flops: int = 0

    def parts(self) -> EngineParts:
        """Engine parts that compute as usual and count here."""

        def linear(
            weight: np.ndarray, bias: np.ndarray | None, name: str
        ) -> Callable[[np.ndarray], np.ndarray]:
            layer = Linear(weight, bias)

            def call(x: np.ndarray) -> np.ndarray:
                self.flops += 2 * len(x) * weight.size
                return layer(x)

            return call

        def attention(
            query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
        ) -> np.ndarray:
            # Per head and visible position: one dot product, one scaled addition.
            _, num_heads, head_dim = query.shape
            self.flops += 4 * num_heads * head_dim * int((batch.positions + 1).sum())
            return paged_attention(query, layer_cache, batch, scale)

        return EngineParts(linear=linear, attention=attention)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens generated, and FLOP and seconds spent up to and including each of them."""

    token_ids: list[int]
    flops: list[int]
    seconds: list[float]


def generate_with_cache(prompt: Sequence[int], n_new: int, model: str | Path | Model) -> Run:
    """One request of `n_new` tokens: a prefill, then one position per step."""
    meter = Meter()
    engine = _engine(model, meter)
    params = SamplingParams(max_tokens=n_new, ignore_eos=True)
    request = engine.requests[engine.add_request(list(prompt), params)]
    flops, seconds, start = [], [], time.perf_counter()
    while not request.is_finished:
        engine.step()
        flops.append(meter.flops)
        seconds.append(time.perf_counter() - start)
    return Run(request.output_token_ids, flops, seconds)


def generate_without_cache(prompt: Sequence[int], n_new: int, model: str | Path | Model) -> Run:
    """The same tokens with no memory: each step is a new request for one token."""
    meter = Meter()
    engine = _engine(model, meter)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    tokens = list(prompt)
    flops, seconds, start = [], [], time.perf_counter()
    for _ in range(n_new):
        tokens += engine.generate([tokens], params)[0].outputs[0].token_ids
        flops.append(meter.flops)
        seconds.append(time.perf_counter() - start)
    return Run(tokens[len(prompt) :], flops, seconds)


def _engine(model: str | Path | Model, meter: Meter) -> LLMEngine:
    # float64: the two ways multiply batches of different shapes, and in float32 that alone can
    # flip a near-tie between two tokens.
    return LLMEngine(model=model, dtype="float64", enable_prefix_caching=False, parts=meter.parts())


def measure(
    prompt: Sequence[int], n_new: int, repeats: int = 1, model: str | Path | Model = "byte-llama"
) -> dict[str, Any]:
    """Both runs, as JSON; of each step's times over the repeats the shortest counts.

    Raises:
        RuntimeError: the two ways produced different tokens.
    """
    without = [generate_without_cache(prompt, n_new, model) for _ in range(repeats)]
    with_cache = [generate_with_cache(prompt, n_new, model) for _ in range(repeats)]
    if any(run.token_ids != without[0].token_ids for run in (*without, *with_cache)):
        raise RuntimeError("the tokens differ: the cache changed the output")
    return {
        "machine": describe(),
        "numpy": np.__version__,
        "prompt_tokens": len(prompt),
        "new_tokens": n_new,
        "repeats": repeats,
        "without_cache": {"flops": without[0].flops, "seconds": _fastest(without)},
        "with_cache": {"flops": with_cache[0].flops, "seconds": _fastest(with_cache)},
    }


def _fastest(runs: Sequence[Run]) -> list[float]:
    """Cumulative seconds, built from each step's shortest duration in any run."""
    steps = np.min([np.diff(run.seconds, prepend=0.0) for run in runs], axis=0)
    return [round(float(seconds), 6) for seconds in np.cumsum(steps)]


def figure(measurement: dict[str, Any]) -> str:
    """FLOP and seconds over tokens generated, side by side, as SVG."""
    n_new, machine = measurement["new_tokens"], measurement["machine"]
    svg = Svg(
        720,
        340,
        "Generation with and without a KV cache: FLOP and seconds",
        f"{measurement['prompt_tokens']} prompt tokens and {n_new} new ones. Without a cache both "
        "curves bend upwards; with one both are straight and close to the axis.",
    )
    panels = [
        (70, "flops", 1e9, "GFLOP, counted"),
        (430, "seconds", 1.0, "seconds, measured"),
    ]
    for left, key, unit, label in panels:
        high = measurement["without_cache"][key][-1] / unit
        step = _round_step(high / 4)
        ticks = {i * step: f"{i * step:g}" for i in range(int(high / step) + 1)}
        axes = Axes(svg, (left, 56, 260, 210), (0, n_new), (0, high * 1.05))
        axes.frame("tokens generated", label, range(0, n_new + 1, n_new // 4), ticks)
        for name, color, words, dy in (
            ("without_cache", ORANGE, "no cache", -6),
            ("with_cache", BLUE, "with a cache", -8),
        ):
            values = measurement[name][key]
            axes.curve([(i + 1, v / unit) for i, v in enumerate(values)], color, width=2.5)
            at = len(values) * 3 // 5
            axes.label(at, values[at - 1] / unit, words, color, dx=-8, dy=dy, anchor="end")
    svg.text(
        70,
        24,
        f"{machine['cpu']}, one thread, numpy {measurement['numpy']}",
        size=12,
    )
    return svg.render()


def _round_step(value: float) -> float:
    """1, 2 or 5 times a power of ten, at least `value`."""
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= value))


def table(measurement: dict[str, Any]) -> str:
    """The measurement as text."""
    rows = ["new tokens   GFLOP without / with   ratio     seconds without / with   ratio"]
    plain, cached = measurement["without_cache"], measurement["with_cache"]
    n_new = measurement["new_tokens"]
    for n in sorted({n_new // 16, n_new // 4, n_new // 2, n_new} - {0}):
        f0, f1 = plain["flops"][n - 1], cached["flops"][n - 1]
        s0, s1 = plain["seconds"][n - 1], cached["seconds"][n - 1]
        rows.append(
            f"{n:>10} {f0 / 1e9:>15.2f} / {f1 / 1e9:<6.2f} {f0 / f1:>6.1f}"
            f" {s0:>16.2f} / {s1:<6.2f} {s0 / s1:>8.1f}"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON and the figure."""
    parser = argparse.ArgumentParser(description="Generate with and without a KV cache.")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt", default=PROMPT, help="text; one byte is one token")
    parser.add_argument("--repeats", type=int, default=2, help="each step's best time counts")
    parser.add_argument("--out", type=Path, default=Path("my-kv-cache"), help="folder to write to")
    args = parser.parse_args(argv)
    if args.new_tokens < 4 or args.repeats < 1 or not args.prompt:
        parser.error("--new-tokens needs at least 4, --repeats at least 1, --prompt some text")
    measurement = measure(list(args.prompt.encode()), args.new_tokens, args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(measurement) + "\n"
    (args.out / "kv-cache.json").write_text(text, encoding="utf-8")
    print(f"{measurement['machine']['cpu']}, one thread")
    print(f"{measurement['prompt_tokens']} prompt tokens; the tokens are equal both ways")
    print(table(measurement))
    print(written(args.out / "kv-cache.svg", lambda: figure(measurement)))


if __name__ == "__main__":
    main()
