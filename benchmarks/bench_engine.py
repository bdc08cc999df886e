"""mini_vllm against `transformers` on the shipped model: same weights, threads and dtype.

    python -m benchmarks.bench_engine --write
    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python -m benchmarks.bench_engine --one-thread --write

Both decode greedily in float32 to the full output length. The uniform rows are one batch of equal
prompts and outputs. In the ragged rows `transformers` gets the best of four static batch sizes,
left-padded, each batch running to its longest output: once with requests in order of arrival, as
a server would have to, and once sorted by output length, which no server knows beforehand.

With `--one-thread` the uniform rows alone, in processor time: what a machine that other programs
share can still say, since there two threads mostly wait for each other.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
import threadpoolctl
import torch
import transformers

from benchmarks.report import README, Paired, machine, paired
from labkit.tables import markdown_table, write_section
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.models.loader import resolve

UNIFORM = ((1, 2.0), (8, 1.3), (64, 1.0))
RAGGED_TARGET = 2.0
PROMPT_LEN, OUTPUT_LEN = 64, 64


class Theirs:
    """`transformers` generate on padded batches of token ids."""

    def __init__(self, folder: str) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # always the full length
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """One static batch, left-padded, run to its longest output."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        longest = max(output_lens)
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
        )
        return [out[i, width : width + n].tolist() for i, n in enumerate(output_lens)]

    def run_batches(
        self, prompts: list[list[int]], lens: list[int], size: int, by_length: bool
    ) -> None:
        """All requests in batches of `size`, in order of arrival or sorted by output length."""
        order = list(range(len(prompts)))
        if by_length:
            order.sort(key=lambda i: -lens[i])
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            self.run([prompts[i] for i in batch], [lens[i] for i in batch])


class Ours:
    """One engine, used again for every run; no prefix is shared between runs by chance."""

    def __init__(self, folder: str) -> None:
        self.engine = LLMEngine(folder, num_blocks=1600, enable_prefix_caching=False)

    def run(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """All requests together, continuously batched."""
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in output_lens]
        return [r.outputs[0].token_ids for r in self.engine.generate(prompts, params)]


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of requests whose outputs are equal from first to last token."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def blas_kernel() -> str:
    """The kernels numpy's OpenBLAS chose for this processor, or was told to use."""
    libraries = threadpoolctl.threadpool_info()
    names = {i["architecture"] for i in libraries if i["internal_api"] == "openblas"}
    return f"OpenBLAS kernels {', '.join(sorted(names)) or 'none'}"


def main() -> None:
    """Measure every row, print the table, and write it into the README if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="byte-llama")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    parser.add_argument("--one-thread", action="store_true", help="uniform rows, processor time")
    args = parser.parse_args()
    if args.one_thread and os.environ["OPENBLAS_NUM_THREADS"] != "1":
        parser.error("--one-thread: need OPENBLAS_NUM_THREADS=1 and OMP_NUM_THREADS=1")
    num_threads = 1 if args.one_thread else 2
    torch.set_num_threads(num_threads)
    clock = time.process_time if args.one_thread else time.perf_counter
    folder = str(resolve(args.model))
    ours, theirs = Ours(folder), Theirs(folder)
    rng = np.random.default_rng(0)

    def draw(count: int, low: int, high: int) -> list[list[int]]:
        return [rng.integers(32, 127, rng.integers(low, high + 1)).tolist() for _ in range(count)]

    rows = []

    def add(name: str, timing: Paired, num_outputs: int, target: float, same: float) -> None:
        speed = [f"{num_outputs / min(t):,.0f}" for t in (timing.ours, timing.theirs)]
        rows.append([name, *speed, timing.ratio_text(), f"{target}x", f"{same:.0%}"])
        print(" | ".join(rows[-1]), flush=True)

    for batch, target in UNIFORM:
        prompts, lens = draw(batch, PROMPT_LEN, PROMPT_LEN), [OUTPUT_LEN] * batch
        timing = paired(
            partial(ours.run, prompts, lens),
            partial(theirs.run, prompts, lens),
            args.repeats,
            clock,
        )
        same = agreement(ours.run(prompts, lens), theirs.run(prompts, lens))
        add(f"batch {batch}, uniform", timing, batch * OUTPUT_LEN, target, same)

    if not args.one_thread:
        prompts = draw(64, 16, 256)
        lens = rng.integers(8, 129, 64).tolist()
        sizes = (8, 16, 32, 64)
        alone = [theirs.run([p], [n])[0] for p, n in zip(prompts, lens, strict=True)]
        same = agreement(ours.run(prompts, lens), alone)
        for by_length, order in ((False, "as they arrive"), (True, "sorted by output length")):
            timings = {
                size: paired(
                    partial(ours.run, prompts, lens),
                    partial(theirs.run_batches, prompts, lens, size, by_length),
                    args.repeats,
                )
                for size in sizes
            }
            best = min(sizes, key=lambda size: min(timings[size].theirs))
            name = f"64 ragged {order}, best static batch {best}"
            add(name, timings[best], sum(lens), RAGGED_TARGET, same)

    header = ["workload", "ours, tokens/s", "transformers, tokens/s",
              "ratio, median (min-max)", "target", "equal outputs"]  # fmt: skip
    text = markdown_table(header, rows)
    modules = (np, torch, transformers)
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in modules) + f"; {blas_kernel()}"
    threads = "1 thread each, processor time" if args.one_thread else "2 threads each"
    text += f"\n\n{machine()}; {versions}; {threads}, float32, {args.repeats} pairs."
    if args.write:
        write_section("engine-one-thread" if args.one_thread else "engine", text, README)


if __name__ == "__main__":
    main()
