"""The allowed bytes of a text, place by place, to look at.

Promises: no engine, no model, no tokens; the machine is the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.machine import Machine, State
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.params import StructuredOutputsConfig, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Place:
    """What may stand at one place of a text."""

    allowed: tuple[int, ...]
    """The bytes that may come next, ascending."""
    may_end: bool
    """Whether the text may end here: EOS is allowed."""
    forced: bytes
    """The bytes that must come, whatever the model wants: each the only one, and no end before."""


def machine_of(params: StructuredOutputsParams, **config: Any) -> Machine:
    """The machine of a constraint; `config` as `structured_outputs_config`.

    Raises:
        GrammarError: the constraint cannot be served.
    """
    made = StructuredOutputsConfig.of(config)
    key = params.key(made)
    return Machine(compile_network(grammar_of(key, made.backend == "xgrammar")))


def allowed_bytes(
    params: StructuredOutputsParams, text: str | bytes = b"", **config: Any
) -> list[Place]:
    """The places before every byte of `text`, and behind the last one.

    Args:
        params: the constraint.
        text: what is written so far.
        config: as `structured_outputs_config`.

    Returns:
        One place more than bytes; fewer where the text leaves the constraint: the last place is
        then the one where it should have gone on otherwise.

    Raises:
        GrammarError: the constraint cannot be served.
    """
    machine = machine_of(params, **config)
    data = text.encode() if isinstance(text, str) else text
    state: State | None = machine.initial
    found: list[Place] = []
    for byte in [*data, None]:
        assert state is not None
        found.append(_place(machine, state))
        state = None if byte is None else machine.step(state, byte)
        if state is None:
            break
    return found


def jump_ahead(machine: Machine, state: State, longest: int = 4096) -> bytes:
    """The bytes that must follow `state`: as long as there is one, and the text may not end.

    What xgrammar calls the jump-forward string (`find_jump_forward_string`, named by
    `vllm/v1/structured_output/backend_xgrammar.py:132` `XgrammarGrammar`).
    """
    return bytes(_forced(machine, state, longest))


def _place(machine: Machine, state: State) -> Place:
    allowed = tuple(byte for byte in range(256) if state.allowed >> byte & 1)
    return Place(allowed, state.accepting, jump_ahead(machine, state))


def _forced(machine: Machine, state: State, longest: int) -> Iterator[int]:
    at: State | None = state
    for _ in range(longest):
        if at is None or at.accepting or at.allowed.bit_count() != 1:
            return
        byte = at.allowed.bit_length() - 1
        yield byte
        at = machine.step(at, byte)
