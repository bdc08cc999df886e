"""The mini engine on the recorded runs of the reasoning gate, and wrong readings of them.

    python -m conformance.features.structured_output.reasoning_replay [--write]

Counts what the runs hold and in how many each wrong reading differs; `--write` puts the tables into
the README.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from conformance import parts
from conformance.mutants import Mutant, diffs, found_in, sources
from labkit.tables import markdown_table, write_section
from mini_vllm import EngineParts, LLMEngine, Sampler, SamplingParams
from mini_vllm.structured_output import StructuredOutputsParams
from mini_vllm.structured_output.reasoning import PARSERS
from mini_vllm.structured_output.request import constraint_of
from mini_vllm.tokenizer import ByteTokenizer

README = Path(__file__).with_name("README.md")
SIZE, START, END = 257, 1, 2
FULL = (1 << SIZE) - 1


class Thinking(ByteTokenizer):
    """Bytes, of which two are the marks around the reasoning."""

    def __init__(self, name: str) -> None:
        self.marks = dict(zip(PARSERS[name], (START, END), strict=True))

    def encode(self, text: str) -> list[int]:
        return [self.marks[text]] if text in self.marks else super().encode(text)


class Flat:
    """A model without an opinion: what the masks leave is seen by the sampler."""

    vocab_size = SIZE

    def forward(self, batch: Any) -> np.ndarray:
        return np.zeros((len(batch.logits_indices), SIZE))


class Script(Sampler):
    """Says what was recorded, and notes under which mask."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.coming = [deque(case["outputs"][each["request_id"]]) for each in case["requests"]]
        self.masks: list[list[str]] = [[] for _ in self.coming]

    def sample(self, logits: np.ndarray, params: Any, rng: Any = None) -> int:
        number = params.seed
        if not self.coming[number]:  # a step in flight behind the end
            return int(np.isfinite(logits).argmax())
        packed = np.packbits(np.isfinite(logits), bitorder="little").tobytes()
        self.masks[number].append(hex(int.from_bytes(packed, "little"))[2:])
        return self.coming[number].popleft()


def drafter(case: dict[str, Any]) -> Any:
    """The recorded drafts, by what they follow."""
    known = {}
    for asked in case["requests"]:
        name, prompt = asked["request_id"], asked["prompt_token_ids"]
        for count, drafts in case["offered"][name].items():
            known[*prompt, *case["outputs"][name][: int(count)]] = drafts
    return lambda context, n, k: known.get(tuple(context), [0] * k)[:k]


def replayed(case: dict[str, Any], kind: str = "regex") -> dict[str, Any]:
    """What the mini engine makes of a run, in the recording's words."""
    names = {"parser": "reasoning_parser", "enable_in_reasoning": "enable_in_reasoning"}
    gate = {ours: case["config"][theirs] for theirs, ours in names.items()}
    return played(case, Thinking(case["config"]["parser"]), gate, kind)


def played(
    case: dict[str, Any], tokenizer: ByteTokenizer, outputs_config: dict[str, Any], kind: str
) -> dict[str, Any]:
    """As `replayed`, of requests whose constraint is of this kind."""
    config, script = case["config"], Script(case)
    names = (
        "async_scheduling", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "max_model_len", "enable_prefix_caching",
    )  # fmt: skip
    knobs = {name: config[name] for name in names}
    engine = LLMEngine(
        Flat(),
        tokenizer=tokenizer,
        parts=EngineParts(
            sampler=lambda: script, rooms={"spec_decode": {"drafter": drafter(case)}}
        ),
        structured_outputs_config=outputs_config,
        **({"speculative_config": config["speculative"]} if "speculative" in config else {}),
        **knobs,
    )
    manager: Any = engine.feature("structured_outputs")
    requests: dict[str, Any] = {}
    for number, asked in enumerate(case["requests"]):
        wanted = StructuredOutputsParams(**{kind: asked[kind]})
        key = wanted.key(manager.config)
        manager.compiler.submit(key, manager.parser.parse(key)).future.result()
        params = SamplingParams(
            max_tokens=asked["max_tokens"], temperature=0, seed=number, structured_outputs=wanted
        )
        engine.add_request(asked["prompt_token_ids"], params, request_id=asked["request_id"])
    steps: list[Any] = []

    def note(plan: Any) -> None:
        requests.update({r.request_id: r for r in plan.scheduled_requests})
        if plan.num_scheduled_tokens:
            drafts = {r: list(found) for r, found in plan.spec_token_ids.items()}
            steps.append([dict(plan.num_scheduled_tokens), drafts])

    engine.observers.append(note)
    while engine.has_unfinished_requests():
        engine.step()
    prompts = {each["request_id"]: len(each["prompt_token_ids"]) for each in case["requests"]}
    return {
        "steps": steps,
        "outputs": {r: q.all_token_ids[prompts[r] :] for r, q in requests.items()},
        "masks": {each["request_id"]: script.masks[n] for n, each in enumerate(case["requests"])},
        "read": {r: constraint_of(q)._tokens for r, q in requests.items()},
        "reasons": {r: str(q.finish_reason) for r, q in requests.items()},
    }


@functools.cache
def cases() -> Sequence[dict[str, Any]]:
    return parts.load("grammar_reasoning")


def expected(case: dict[str, Any]) -> dict[str, Any]:
    """As the mini engine says it: token 0 stands in a refused draft's place."""
    steps = [
        [counts, {r: [max(token, 0) for token in found] for r, found in drafts.items()}]
        for counts, drafts in case["steps"] if counts
    ]  # fmt: skip
    return {key: case[key] for key in ("outputs", "masks", "read", "reasons")} | {"steps": steps}


def differing(which: Sequence[dict[str, Any]]) -> list[int]:
    """The runs in which anything differs."""
    return [number for number, case in enumerate(which) if replayed(case) != expected(case)]


def told() -> Counter[str]:
    """What the recorded runs hold: runs, then requests."""
    counts = Counter[str]()
    for case in cases():
        config = case["config"]
        ahead = "ahead" if config["async_scheduling"] else "not ahead"
        drafts = "drafts" if "speculative" in config else "no drafts"
        counts[f"{ahead}, {drafts}"] += 1
        counts[config["parser"]] += 1
        for asked in case["requests"]:
            name = asked["request_id"]
            said, masks = case["outputs"][name], case["masks"][name]
            is_masked = [int(mask, 16) != FULL for mask in masks]
            counts["free first, then masked"] += any(is_masked) and not is_masked[0]
            counts["masked at once"] += is_masked[0]
            counts["never masked"] += not any(is_masked)
            counts["the end is passed over"] += END in said[:-1] and not any(is_masked)
            counts["refused drafts"] += any(-1 in d.get(name, ()) for _, d in case["steps"])
            first = is_masked.index(True) if any(is_masked) else 0
            counts["masked without an end before it"] += first > 0 and said[first - 1] != END
    return counts


WRONG = diffs(
    """
masks from the first token
@ structured_output.request
-        if self.reasoner is None:
+        if True:
             return prompt

looks at every token of a step for the end
@ structured_output.request
-        start = request.num_computed_tokens - num_pending
+        start = self.step_start

reads the token that ends the reasoning
@ structured_output.request
-            self.reads_from = self.num_begun if self.reads_last_step else request.num_tokens
+            self.reads_from = request.num_tokens - 1

does not look into the prompt
@ structured_output.request
-            if self.reasoner.is_reasoning_end(prompt):
+            if False:

takes any end in the prompt
@ structured_output.request
-            if self.reasoner.is_reasoning_end(prompt):
+            if self.reasoner.is_reasoning_end_streaming(prompt):

takes a prompt without marks for one whose reasoning has ended
@ structured_output.reasoning
-        return False
+        return True

does not see tokens in flight
@ structured_output.request
-        steps = [(self.num_begun, self.step_start)]
+        return None

sees the end in flight one step late
@ structured_output.request
-            steps.append((self.step_start, len(tokens) + len(in_flight)))
+            pass

looks at the last token alone after a preemption
@ structured_output.request
-        if start < 0:
+        start = max(start, request.num_tokens - 1)
+        if start < 0:

looks for the end in drafts
@ structured_output.request
-        steps = [(self.num_begun, self.step_start)]
+        steps = [(end, end) for end in range(self.step_start, request.num_tokens + 1)]

lets the grammar judge thoughts
@ structured_output.manager
-        if start is None:
-            return list(drafts)
+        start = request.num_prompt_tokens if start is None else start

reads what is in flight before the end
@ structured_output.manager
-        in_flight = in_flight[max(start - request.num_tokens, 0) :]
+        pass

has no way to constrain the reasoning
@ structured_output.manager
-            self.reasoner = None if self.config.enable_in_reasoning else parser
+            self.reasoner = parser
"""
)


def caught(mutant: Mutant) -> int:
    """In how many runs an engine with the mutant's classes differs."""
    find = found_in(sources(mutant))
    names = {"request": "Constraint", "reasoning": "ReasoningParser",
             "manager": "StructuredOutputManager"}  # fmt: skip
    classes = {name: find(f"structured_output.{module}", name) for module, name in names.items()}
    with mock.patch.multiple("mini_vllm.structured_output.manager", **classes):
        return len(differing(cases()))


def main() -> int:
    """Both tables."""
    held = [[name, str(count)] for name, count in told().items()]
    wrong = [[each.name, str(caught(each))] for each in WRONG]
    tables = {
        "grammar-reasoning": markdown_table(["the runs", "how many"], held),
        "grammar-reasoning-mutants": markdown_table(["an engine that", "runs that differ"], wrong),
    }
    for name, text in tables.items():
        print(text)
        if "--write" in sys.argv:
            write_section(name, text, README)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
