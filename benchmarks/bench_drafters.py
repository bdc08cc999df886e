"""What each drafter gets accepted on the same prompts, and what EAGLE's dropped block costs.

    python -m benchmarks.bench_drafters --write

Counts, no times: greedy, float32, the three kinds of text of `bench_spec`, 64 prompts of 96 tokens
each. The second table serves 64 prompts with one beginning, 24 tokens each, with the rule that a
hit loses its last block for a drafter that reads hidden states, and without it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_spec import OUTPUT_LEN, PASSAGE, ROOT, prompts
from labkit.tables import markdown_table, write_section
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.plan import SchedulerOutput

README = Path(__file__).with_name("README.md")
DATA = Path(__file__).with_name("drafters.json")
KINDS = ("code", "quoted", "prose")
NGRAM = {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 6}
DRAFT = {"method": "draft_model", "model": str(ROOT / "models" / "byte-draft")}
MTP = {"method": "mtp", "model": str(ROOT / "models" / "byte-mtp")}
DRAFTERS: list[dict[str, Any]] = [
    {**config, "num_speculative_tokens": k}
    for config, k in ((NGRAM, 3), (DRAFT, 3), (MTP, 1), (MTP, 3), (MTP, 6))
]
BLOCK = 16


def accepted(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """One drafter on one kind of text."""
    engine = LLMEngine(
        num_blocks=2400, enable_prefix_caching=False, max_num_seqs=64,
        max_num_batched_tokens=8192, speculative_config=config,
    )  # fmt: skip
    runs = -64  # a prompt's own run, which gives its first token, does not count

    def note(plan: SchedulerOutput) -> None:
        nonlocal runs
        runs += len(plan.sampling_req_ids)

    engine.observers.append(note)
    wish = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
    engine.generate(prompts(kind, 64), wish)
    stats = engine.feature("spec_decode").stats
    return {
        "text": kind,
        "drafter": config["method"],
        "k": config["num_speculative_tokens"],
        "runs_with_drafts": round(stats.num_drafts / runs, 3),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
        "tokens_per_run": round(64 * (OUTPUT_LEN - 1) / runs, 3),
        "per_position": [round(rate, 3) for rate in stats.acceptance_rates_per_pos],
    }


def dropped(length: int, drops: bool) -> dict[str, Any]:
    """64 prompts that share their first `length` bytes, served one by one, drafts by the module."""
    text = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    tails = [text[300 + 61 * n : 300 + 61 * n + 40] for n in range(64)]
    shared = (f"{PASSAGE}\n\n" * 3).encode()[:length]
    engine = LLMEngine(
        block_size=BLOCK, num_blocks=2400, max_num_seqs=1,
        speculative_config={**MTP, "num_speculative_tokens": 3},
    )  # fmt: skip
    engine.scheduler.kv.use_eagle = drops
    hits: list[int] = []
    first: list[int] = []
    fresh: set[str] = set()

    def note(plan: SchedulerOutput) -> None:
        hits.extend(plan.num_cached_tokens.values())

    engine.observers.append(note)
    stats = engine.feature("spec_decode").stats
    wish = SamplingParams(max_tokens=24, ignore_eos=True)
    verify = engine.feature("spec_decode").observe

    def observe(plan: Any, sampled: Any, finished: Any) -> None:
        verify(plan, sampled, finished)
        for request in plan.scheduled_requests:
            tokens = sampled.get(request.request_id)
            if request.request_id in plan.spec_token_ids and tokens and request.request_id in fresh:
                fresh.discard(request.request_id)
                first.append(len(tokens) - 1)

    engine.feature("spec_decode").observe = observe
    for number, tail in enumerate(tails):
        fresh.add(name := f"r{number}")
        engine.add_request([*shared, *tail.encode()], wish, request_id=name)
        while engine.has_unfinished_requests():
            engine.step()
    return {
        "shared": length,
        "drops": drops,
        "hit_tokens": round(float(np.mean(hits[1:])), 1),
        "first_run": round(float(np.mean(first)), 3),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
    }


def write(rows: list[dict[str, Any]], hits: list[dict[str, Any]]) -> None:
    """Both tables into the page, and the numbers beside it."""
    lengths = markdown_table(
        ["drafter", "text", "runs with drafts", "mean acceptance length", "tokens per run",
         "kept at position 1, 2, ..."],
        [
            [f"{row['drafter']}, k={row['k']}", row["text"], f"{row['runs_with_drafts']:.0%}",
             f"{row['mean_acceptance_length']:.2f}", f"{row['tokens_per_run']:.2f}",
             " ".join(f"{rate:.2f}".removeprefix("0") for rate in row["per_position"])]
            for row in rows
        ],
    )  # fmt: skip
    blocks = markdown_table(
        ["shared bytes", "last block of a hit", "tokens hit", "drafts kept in the first run",
         "mean acceptance length"],
        [
            [str(row["shared"]), "dropped" if row["drops"] else "kept", f"{row['hit_tokens']:.0f}",
             f"{row['first_run']:.2f}", f"{row['mean_acceptance_length']:.3f}"]
            for row in hits
        ],
    )  # fmt: skip
    write_section("drafters", f"\n{lengths}\n\n{blocks}", README)
    DATA.write_text(json.dumps({"accepted": rows, "dropped_block": hits}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_drafters")
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    arguments = parser.parse_args()
    rows = []
    for config in DRAFTERS:
        for kind in KINDS:
            rows.append(accepted(kind, config))
            print(rows[-1], flush=True)
    hits = [dropped(length, drops) for length in (320, 328) for drops in (True, False)]
    print(*hits, sep="\n")
    if arguments.write:
        write(rows, hits)


if __name__ == "__main__":
    main()
