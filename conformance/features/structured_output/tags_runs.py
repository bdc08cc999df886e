"""Record structural tags in the real scheduler: with drafts, and with a step in flight.

    course engine run -m conformance.record grammar_tags_runs

The runs are those of `reasoning.py`, half of them without a parser, and the grammars are those that
the real backend makes of structural tags. What the model says and what the drafter offers is
written with a tag's letters, so that a trigger ends in a draft, behind a refused one and in the
step in flight. Under a parser the model says the marks of reasoning too.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

from conformance.features.structured_output import reasoning
from conformance.features.structured_output.tags import TEXT, const, real_grammar, tag, tags, whole

ABOUT = reasoning.ABOUT.replace(", regex}]`", ", structural_tag}]`")
RUNS = 240
ONE = tag("ab", "c", const("ba"))
SPECS = tuple(
    json.dumps(whole(form))
    for form in (
        tags(["ab"], [ONE]),
        tags(["ab"], [ONE, tag("aba", "", const("bb"))]),
        tags(["aab", "c"], [tag("aab", "a", const("c")), tag("cb", "b", const("a"))]),
        tags(["ab"], [ONE], at_least_one=True, excludes=["cc"]),
        tags(["ab"], [ONE], stop_after_first=True),
        tag("a", "bb", tags(["ca"], [tag("ca", "b", TEXT)])),
    )
)


def cases() -> Iterator[dict[str, Any]]:
    """The runs; the same every time."""
    from conformance.features.structured_output import peers

    logging.disable(logging.ERROR)
    peer = peers.XGrammar()
    for seed in range(RUNS):
        yield _Run(peer, random.Random(f"tags {seed}"), seed).recorded()


class _Run(reasoning.Run):
    def drawn(self, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        rng, config = self.rng, reasoning.config_of(self.rng, seed)
        letters = [*b"abc", reasoning.START, reasoning.END]
        if seed & 4:
            del config["parser"], config["enable_in_reasoning"], letters[3:]
        requests = [
            {
                "request_id": f"r{number}",
                "prompt_token_ids": [110 + number, *rng.choices(letters, k=rng.randint(2, 10))],
                "max_tokens": rng.randint(6, 24),
                "structural_tag": rng.choice(SPECS),
            }
            for number in range(rng.randint(1, 4))
        ]
        return config, requests

    def constrain(self, request: Any, asked: dict[str, Any]) -> None:
        """With its kind, which the real manager asks for where the reasoning ends."""
        from vllm.sampling_params import StructuredOutputsParams

        params = StructuredOutputsParams(structural_tag=asked["structural_tag"])
        request.structured_output_request.params = params
        super().constrain(request, asked)

    def matcher(self, asked: dict[str, Any]) -> Any:
        return real_grammar(self.peer, asked["structural_tag"], self.k).matcher

    def say(self, mask: int, draft: int | None) -> int:
        if draft is not None and draft >= 0 and mask >> draft & 1:
            return draft if self.rng.random() < self.acceptance else self.possible(mask)
        return self.possible(mask)

    def possible(self, mask: int) -> int:
        """One of a tag's letters, nearly always; sometimes the end."""
        if "parser" in self.config and mask >> reasoning.END & 1 and self.rng.random() < 0.15:
            return self.rng.choice((reasoning.START, reasoning.END, reasoning.END))
        wanted = [token for token in b"abc" if mask >> token & 1]
        if wanted and self.rng.random() < 0.95:
            return self.rng.choice(wanted)
        return super().possible(mask)

    def is_read(self, request: Any) -> bool:
        return True
