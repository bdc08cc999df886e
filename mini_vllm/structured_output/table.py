"""A compiled grammar as a table of states and characters, for a part that lifts it to tokens.

Promises: states, edges and ends are the machine's own, made as they are asked for, so that a
grammar without end has a table, too. A character stands for a byte (Latin-1). Mirrors the table
that `vllm/v1/structured_output/backend_outlines.py:108` `OutlinesGrammar` walks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mini_vllm.structured_output.machine import Machine, State


class Row(Mapping[str, State]):
    """The edges of one state: character to state."""

    __slots__ = ("_machine", "_state")

    def __init__(self, machine: Machine, state: State) -> None:
        self._machine, self._state = machine, state

    def __getitem__(self, char: str) -> State:
        after = self._machine.step(self._state, ord(char))
        if after is None:
            raise KeyError(char)
        return after

    def __contains__(self, char: object) -> bool:
        return isinstance(char, str) and bool(self._state.allowed >> ord(char) & 1)

    def __iter__(self) -> Iterator[str]:
        return (chr(byte) for byte in range(256) if self._state.allowed >> byte & 1)

    def __len__(self) -> int:
        return self._state.allowed.bit_count()


class _Rows:
    """`rows[state]`: the row of a state."""

    __slots__ = ("_machine",)

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getitem__(self, state: State) -> Row:
        return Row(self._machine, state)

    def get(self, state: State, default: object = None) -> Row:
        """As of a dict that has every state."""
        return self[state]


class _Accepting:
    """`state in accepting`: whether the text may end there."""

    __slots__ = ()

    def __contains__(self, state: State) -> bool:
        return state.accepting


class Table:
    """`transitions[state][character]` is the next state; `accepting`; `start`."""

    __slots__ = ("accepting", "start", "transitions")

    def __init__(self, machine: Machine) -> None:
        self.transitions = _Rows(machine)
        self.accepting = _Accepting()
        self.start = machine.initial
