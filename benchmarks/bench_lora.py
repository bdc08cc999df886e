"""64 requests over 8 adapters in one batch, against the same requests adapter by adapter.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.bench_lora --write

Requests arrive interleaved: the next one always wants another adapter. "in order" is a server that
holds one adapter and takes requests as they come, as a scheduler would that stops at an adapter
without a slot; "grouped" one that knows them all and serves adapter after adapter, eight requests
in a batch; "merged" is grouped, on weights that each adapter was merged into before; "base" is one
batch without adapters: what the deltas cost. Greedy on the shipped model, float32, equal settings;
texts are compared. The adapters are random, rank 8 on every linear.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.report import README, Paired, machine
from labkit.tables import markdown_table, write_section
from mini_vllm import LLM, SamplingParams
from mini_vllm.lora.request import LoRARequest
from mini_vllm.lora.weights import load_adapter, projections
from mini_vllm.models.loader import SHIPPED_MODEL, load_checkpoint
from mini_vllm.models.transformer import Transformer

NUM_REQUESTS, NUM_ADAPTERS, RANK = 64, 8, 8
PROMPT, OUTPUT = 32, 32
TARGET = 4.0
KNOBS: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 64, "enable_prefix_caching": False}
Texts = list[list[int]]


def write_adapter(folder: Path, seed: int) -> LoRARequest:
    """A random adapter on every linear of the shipped model."""
    rng, held = np.random.default_rng(seed), {}
    for packed in projections(load_checkpoint(SHIPPED_MODEL).config).values():
        for p in packed:
            for half, shape in (("A", (RANK, p.in_features)), ("B", (p.out_features, RANK))):
                name = f"base_model.model.{p.name}.lora_{half}.weight"
                held[name] = rng.normal(0, 0.03, shape).astype(np.float32)
    folder.mkdir()
    save_file(held, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed + 1, str(folder))


def merged(adapter: LoRARequest) -> LLM:
    """An engine whose weights an adapter was merged into."""
    checkpoint = load_checkpoint(SHIPPED_MODEL)
    deltas = load_adapter(adapter.lora_path, projections(checkpoint.config), RANK)
    weights = dict(checkpoint.weights)
    for name, (a, b) in deltas.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + b @ a
    return LLM(Transformer(checkpoint.config, weights), **KNOBS)


def measure(repeats: int, home: Path) -> tuple[dict[str, Paired], dict[str, float]]:
    """Per contender the paired times, and the share of texts that are those of the one batch."""
    adapters = [write_adapter(home / f"a{i}", i) for i in range(NUM_ADAPTERS)]
    rng = np.random.default_rng(0)
    prompts = rng.integers(32, 127, (NUM_REQUESTS, PROMPT)).tolist()
    wanted = [adapters[i % NUM_ADAPTERS] for i in range(NUM_REQUESTS)]
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    lora = LLM(enable_lora=True, max_loras=NUM_ADAPTERS, max_lora_rank=RANK, **KNOBS)
    plain, alone = LLM(**KNOBS), [merged(adapter) for adapter in adapters]

    def ask(llm: LLM, numbers: list[int], use: bool) -> Texts:
        chosen = [wanted[i] for i in numbers] if use else None
        found = llm.generate([prompts[i] for i in numbers], params, chosen)
        return [result.outputs[0].token_ids for result in found]

    every = list(range(NUM_REQUESTS))
    groups = [every[i::NUM_ADAPTERS] for i in range(NUM_ADAPTERS)]

    def by_groups(serve: Callable[[int, list[int]], Texts]) -> Texts:
        texts: Texts = [[] for _ in every]
        for number, group in enumerate(groups):
            for i, text in zip(group, serve(number, group), strict=True):
                texts[i] = text
        return texts

    one_batch = functools.partial(ask, lora, every, True)
    others: dict[str, Callable[[], Texts]] = {
        "in order": lambda: [ask(lora, [i], True)[0] for i in every],
        "grouped": lambda: by_groups(lambda number, group: ask(lora, group, True)),
        "merged": lambda: by_groups(lambda number, group: ask(alone[number], group, False)),
        "base": lambda: ask(plain, every, False),
    }
    texts = one_batch()
    equal = {name: _share(texts, other()) for name, other in others.items()}
    timings = {name: Paired([], []) for name in others}
    for _ in range(repeats):
        for name, other in others.items():
            for run, times in ((one_batch, timings[name].ours), (other, timings[name].theirs)):
                began = time.thread_time()
                run()
                times.append(time.thread_time() - began)
    return timings, equal


def _share(mine: Texts, theirs: Texts) -> float:
    return sum(a == b for a, b in zip(mine, theirs, strict=True)) / len(mine)


def main() -> None:
    """Measure, print, and write the table into the README if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        timings, equal = measure(args.repeats, Path(home))
    what = {
        "in order": "one adapter at a time, in order of arrival",
        "grouped": "adapter after adapter, grouped: 8 in a batch",
        "merged": "the same, on merged weights",
        "base": "one batch without adapters",
    }
    tokens = NUM_REQUESTS * OUTPUT
    rows = []
    for name, timing in timings.items():
        speeds = [f"{tokens / statistics.median(t):,.0f}" for t in (timing.ours, timing.theirs)]
        goal = f"{TARGET}x" if name == "in order" else "-"
        same = "-" if name == "base" else f"{equal[name]:.0%}"
        rows.append([what[name], *speeds, timing.ratio_text(), goal, same])
        print(" | ".join(rows[-1]), flush=True)
    header = [
        "against", "one batch, tokens/s", "the other", "ratio, median (min-max)", "target",
        "equal texts",
    ]  # fmt: skip
    text = markdown_table(header, rows)
    text += (
        f"\n\n{NUM_REQUESTS} requests over {NUM_ADAPTERS} adapters of rank {RANK} on every linear, "
        f"prompts of {PROMPT}, {OUTPUT} tokens each; median of {args.repeats} pairs, this thread's "
        f"CPU time. {machine()}, numpy {np.__version__}."
    )
    if args.write:
        write_section("lora", text, README)


if __name__ == "__main__":
    main()
