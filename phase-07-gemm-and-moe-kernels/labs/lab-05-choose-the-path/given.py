"""What vLLM 0.22.1's own oracles chose for experts, case by case: `expert_backends`.

    python given.py fp8_block 9.0        the cases of a checkpoint on a card, with what was refused

Recorded by `conformance/features/moe/expert_backends.py`, which runs the pinned code for cards that
it simulates. Choices, not runs. Given: nothing here is for you to write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from conformance import parts

KNOBS = ("capability", "flashinfer", "checkpoint", "deployment", "lora")
"""Of a case: the fields of the lab's `Layer`."""


@cache
def cases() -> list[dict[str, Any]]:
    """All 640, in the recording's order."""
    return parts.load("expert_backends")


def layer_of(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the lab's `Layer`."""
    return {name: case[name] for name in KNOBS}


def chosen(case: dict[str, Any]) -> tuple[str, bool] | None:
    """The backend and whether its kernel routes; None where the start is an error."""
    return None if case["backend"] is None else (case["backend"], case["monolithic"])


def reasons(case: dict[str, Any]) -> str:
    """Upstream's own lines on the candidates before the chosen one, or its error."""
    return "\n".join(case.get("refused") or [case.get("error", "no candidate was refused")])


def table(checkpoint: str, capability: str) -> Iterator[str]:
    """A line for each case, and under it why better candidates were refused."""
    for case in cases():
        if (case["checkpoint"], case["capability"]) == (checkpoint, capability):
            found = chosen(case)
            said = "error" if found is None else found[0] + " (routes inside)" * found[1]
            has = "FlashInfer" if case["flashinfer"] else "-"
            adapters = "adapters" if case["lora"] else "-"
            yield f"{case['deployment']:16} {has:11} {adapters:9} {said}"
            yield from (f"    {line}" for line in reasons(case).splitlines())


if __name__ == "__main__":
    try:
        print("\n".join(table(*sys.argv[1:])) or f"no case of {sys.argv[1:]}")
    except TypeError:
        sys.exit(__doc__)
