"""Masks per second, cached and not, beside xgrammar's in one run; and their share of a step.

    OMP_NUM_THREADS=1 course engine run -m benchmarks.bench_structured --write

A text is followed token by token: fill the mask, accept the token. "first" is a machine that has
just been compiled, "again" one whose states have been visited; xgrammar's grammar is compiled
before either clock starts, and a matcher is new for each text. The share is that of the masks (and
of following the tokens) in the whole step of the shipped model, every request constrained; cached
means that an equal batch has run before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.report import README, Paired, machine
from conformance import parts
from conformance.features.structured_output import peers as grammar_peers
from labkit.tables import markdown_table, write_section
from mini_vllm import LLM, SamplingParams
from mini_vllm.structured_output import StructuredOutputsParams
from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.masks import allocate_bitmask
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.vocabulary import Vocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
                   "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age"],
}  # fmt: skip
CONSTRAINTS: dict[str, tuple[str, Any, list[str]]] = {
    "regex, a date": ("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}", ["2024-02-29", "1999-12-31"] * 8),
    "JSON Schema, three properties": (
        "json", PERSON,
        [json.dumps({"name": f"Ada {i}", "age": i, "tags": ["x", "yz"] * i}) for i in range(16)],
    ),
    "any JSON object": (
        "json", {"type": "object"},
        [json.dumps({"a": [i, {"b": [True, None, "text"] * 3}], "c": -1.5e3}) for i in range(16)],
    ),
}  # fmt: skip
TARGET = 0.05


def words() -> tuple[list[bytes], int]:
    """The trained vocabulary of the recorded masks, and its EOS."""
    found = next(c for c in parts.load("grammar_masks") if c.get("words"))
    return [bytes.fromhex(token) for token in found["tokens"]], found["eos"]


def tokens_of(text: str, known: Sequence[bytes], eos: int) -> list[int]:
    """The longest token that fits, again and again."""
    ids = {token: number for number, token in enumerate(known) if number != eos}
    data, found = text.encode(), []
    while data:
        length = next(n for n in range(min(16, len(data)), 0, -1) if data[:n] in ids)
        found.append(ids[data[:length]])
        data = data[length:]
    return found


def seconds(run: Callable[[], object]) -> float:
    """Of this thread's processor."""
    began = time.thread_time()
    run()
    return time.thread_time() - began


def masks(repeats: int) -> list[list[str]]:
    """A row per constraint and vocabulary."""
    rows = []
    for name, (known, eos) in {"257 bytes": (grammar_peers.BYTES, 256), "words": words()}.items():
        vocabulary = Vocabulary(known, [eos])
        peer = grammar_peers.XGrammar(known, eos)
        label = name if name != "words" else f"{len(known):,} words"
        for what, (kind, spec, texts) in CONSTRAINTS.items():
            told = [tokens_of(text, known, eos) for text in texts]
            text = json.dumps(spec) if kind == "json" else spec
            network = compile_network(grammar_of((kind, text, False, True)))
            options = {"any_whitespace": True} if kind == "json" else {}
            first, again = Paired([], []), Paired([], [])
            for _ in range(repeats):
                made = Machine(network)
                for timing in (first, again):
                    matchers = [Matcher(made, vocabulary) for _ in told]
                    theirs = [peer.matcher(kind, spec, **options) for _ in told]
                    timing.ours.append(seconds(partial(follow, matchers, told, vocabulary.size)))
                    timing.theirs.append(seconds(partial(follow_xgrammar, peer, theirs, told)))
            count = sum(len(each) + 1 for each in told)
            speeds = [f"{count / statistics.median(t):,.0f}"
                      for t in (first.ours, again.ours, again.theirs)]  # fmt: skip
            rows.append([what, label, *speeds, first.ratio_text(), again.ratio_text()])
            print(" | ".join(rows[-1]), flush=True)
    return rows


def compiles(repeats: int) -> list[list[str]]:
    """A row per number of properties: from the schema's text to the first mask."""
    vocabulary, peer = Vocabulary(grammar_peers.BYTES, [256]), grammar_peers.XGrammar()
    bitmask = allocate_bitmask(1, vocabulary.size)

    def mine(text: str) -> None:
        machine = Machine(compile_network(grammar_of(("json", text, False, True))))
        Matcher(machine, vocabulary).fill_bitmask(bitmask, 0)

    def theirs(schema: Any) -> None:
        peer.mask(peer.matcher("json", schema, any_whitespace=True))

    rows = []
    for count in (1, 10, 50, 200):
        kinds = ({"type": "string"}, {"type": "integer"}, {"enum": ["red", "green"]})
        named = {f"property_{i}": kinds[i % 3] for i in range(count)}
        schema = {"type": "object", "properties": named, "required": list(named)[::2]}
        timing = Paired([], [])
        for _ in range(repeats):
            timing.ours.append(seconds(partial(mine, json.dumps(schema))))
            timing.theirs.append(seconds(partial(theirs, schema)))
        taken = [f"{1000 * statistics.median(t):.1f}" for t in (timing.ours, timing.theirs)]
        rows.append([str(count), *taken, timing.ratio_text()])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def follow(matchers: Sequence[Matcher], told: Sequence[Sequence[int]], size: int) -> None:
    """Ours: a mask before every token, and one more."""
    bitmask = allocate_bitmask(1, size)
    for matcher, tokens in zip(matchers, told, strict=True):
        for token in tokens:
            matcher.fill_bitmask(bitmask, 0)
            assert matcher.accept_tokens("", [token])
        matcher.fill_bitmask(bitmask, 0)


def follow_xgrammar(peer: Any, matchers: Sequence[Any], told: Sequence[Sequence[int]]) -> None:
    """The same with xgrammar's matchers."""
    bitmask = peer.xgr.allocate_token_bitmask(1, peer.size)
    for matcher, tokens in zip(matchers, told, strict=True):
        for token in tokens:
            matcher.fill_next_token_bitmask(bitmask, 0)
            assert matcher.accept_token(token)
        matcher.fill_next_token_bitmask(bitmask, 0)


def shares(repeats: int) -> list[list[str]]:
    """The masks' share of a step, by batch size."""
    rows = []
    for batch in (1, 8, 64):
        cold: list[float] = []
        warm: list[float] = []
        for _ in range(repeats):
            llm = LLM(num_blocks=1200, max_num_seqs=64, structured_outputs_config={
                "backend": "xgrammar", "disable_any_whitespace": True})  # fmt: skip
            params = [SamplingParams(max_tokens=24, structured_outputs=StructuredOutputsParams(
                json=PERSON))] * batch  # fmt: skip
            for found in (cold, warm):
                found.append(_share(llm, params))
        texts = [f"{statistics.median(s):.1%} ({min(s):.1%}-{max(s):.1%})" for s in (cold, warm)]
        rows.append([str(batch), *texts, f"{TARGET:.0%}"])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def _share(llm: LLM, params: list[SamplingParams]) -> float:
    """Seconds in the mask over seconds in all steps."""
    engine, spent = llm.llm_engine, 0.0
    manager = engine.feature("structured_outputs")

    class Timed:
        """The manager with a clock."""

        def __getattr__(self, name: str) -> Any:
            return getattr(manager, name)

        def __call__(self, request: Any, row: np.ndarray) -> np.ndarray:
            nonlocal spent
            began = time.thread_time()
            found = manager(request, row)
            spent += time.thread_time() - began
            return found

    engine.row_sampler.masks = [Timed()]
    prompts = [f"Person {i}: " for i in range(len(params))]
    total = seconds(lambda: llm.generate(prompts, params))
    return spent / total


def main() -> None:
    """Measure, print, and write the tables into the README if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    args = parser.parse_args()
    header = ["constraint", "vocabulary", "first, masks/s", "again, masks/s", "xgrammar, masks/s",
              "first, ratio (min-max)", "again, ratio (min-max)"]  # fmt: skip
    text = markdown_table(header, masks(args.repeats))
    of_compiling = ["properties", "ours, ms", "xgrammar, ms", "ratio, median (min-max)"]
    text += "\n\n" + markdown_table(of_compiling, compiles(args.repeats))
    of_step = ["requests in the batch", "masks first", "masks cached", "target, cached"]
    text += "\n\n" + markdown_table(of_step, shares(args.repeats))
    text += (
        f"\n\nMedians of {args.repeats} runs in turn, this thread's CPU time; a ratio is how many "
        f"times faster ours is. {machine()}, numpy {np.__version__}."
    )
    if args.write:
        write_section("structured", text, README)


if __name__ == "__main__":
    main()
