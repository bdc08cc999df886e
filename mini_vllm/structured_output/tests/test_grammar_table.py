"""A compiled grammar as a table: the machine's own states, and a part that lifts them."""

from __future__ import annotations

import pytest

from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.table import Table
from mini_vllm.structured_output.vocabulary import Vocabulary

WORDS = [b"0", b"x", b"0x", b"1f", b"1x", b"", None, b"\xc3", b"\xa9"]
EOS = 9


def machine_of(regex: str) -> Machine:
    return Machine(compile_network(grammar_of(("regex", regex, False, False))))


def test_rows_are_the_machines_edges() -> None:
    machine = machine_of("0x[0-9]+é?")
    table = Table(machine)
    row = table.transitions[table.start]
    assert list(row) == ["0"] and len(row) == 1 and "0" in row and "x" not in row
    state = row["0"]
    assert state is machine.step(machine.initial, ord("0"))
    assert table.transitions.get(state).get("y") is None
    assert table.start not in table.accepting
    state = table.transitions[table.transitions[state]["x"]]["7"]
    assert state in table.accepting
    assert [char for char in table.transitions[state] if not char.isdigit()] == ["\xc3"]
    with pytest.raises(KeyError):
        table.transitions[state]["x"]


def lift(table, state, texts):
    """Every token whose characters live, in the plainest way."""
    for token, text in texts.items():
        at = state
        for char in text:
            at = at and table.transitions[at].get(char)
        if text and at is not None:
            yield token


def test_a_part_that_lifts_finds_the_tries_tokens() -> None:
    machine = machine_of("0x[0-9a-f]+é*")
    own, lifted = Vocabulary(WORDS, [EOS], 12), Vocabulary(WORDS, [EOS], 12, lift)
    todo, seen = [machine.initial], set()
    while todo:
        state = todo.pop()
        if id(state) in seen:
            continue
        seen.add(id(state))
        assert lifted.allowed(machine, state) == own.allowed(machine, state)
        todo += [after for byte in range(256) if (after := machine.step(state, byte))]
    assert len(seen) == 6


@pytest.mark.parametrize("found", [[5], [EOS], [-1], [400], ["0"]])
def test_an_id_without_text_is_refused_by_name(found) -> None:
    machine = machine_of("0x")
    vocabulary = Vocabulary(WORDS, [EOS], 12, lambda table, state, texts: found)
    with pytest.raises(ValueError, match="token_masks part"):
        vocabulary.allowed(machine, machine.initial)
