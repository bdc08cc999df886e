"""The automaton that follows a text byte by byte: sets of states over a stack that they share.

Promises: a state says exactly which bytes can follow and whether the text may end here (C2); equal
states are one object (C4), so what was worked out for one (a step, a mask) is kept and found again.
The subset construction, done as states are visited; the stack is that of a pushdown automaton,
shared among the members of a set as in Earley's algorithm, which is what xgrammar's matcher uses
too (`vllm/v1/structured_output/backend_xgrammar.py:132` `XgrammarGrammar` wraps it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mini_vllm.structured_output.expressions import GrammarError
from mini_vllm.structured_output.network import Network

MAX_ITEMS = 20_000
"""Members of one set: what a step may cost."""

MAX_KEPT = 50_000
"""States kept of one grammar; when there are more, all are forgotten and found anew."""


class Frame:
    """What comes after a call: (state, frame) pairs to go on from. Equal frames are one object."""

    __slots__ = ("returns",)

    def __init__(self, returns: tuple[tuple[int, Frame], ...] = ()) -> None:
        self.returns = returns


Item = tuple[int, Frame]


class State:
    """Where a text stands: what may follow."""

    __slots__ = ("accepting", "after", "allowed", "kept", "moves")

    def __init__(self, moves: list[tuple[int, int, Frame]], accepting: bool) -> None:
        self.moves = moves
        self.accepting = accepting
        """Whether the text may end here."""
        allowed = 0
        for bytes_, _, _ in moves:
            allowed |= bytes_
        self.allowed = allowed
        """The bytes that can follow: bit b stands for byte b. Each leads to some whole text."""
        self.after: dict[int, State] = {}
        self.kept: dict[Any, Any] = {}
        """What others worked out for this state, such as a mask per vocabulary."""


class Machine:
    """A network that is run. Made once per grammar, shared by all requests that use it."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._bottom = Frame()
        self._frames: dict[frozenset[Item], Frame] = {}
        self._states: dict[frozenset[Item], State] = {}
        self._equal: dict[tuple[frozenset[tuple[int, int, Frame]], bool], State] = {}
        self.initial = self._state_of(frozenset([(network.entry, self._bottom)]))

    @property
    def num_states(self) -> int:
        """How many states have been visited and are kept."""
        return len(self._equal)

    def step(self, state: State, byte: int) -> State | None:
        """The state after one more byte, or None where the byte cannot follow."""
        found = state.after.get(byte)
        if found is None and state.allowed >> byte & 1:
            bit = 1 << byte
            kernel = frozenset((t, frame) for bytes_, t, frame in state.moves if bytes_ & bit)
            found = state.after[byte] = self._state_of(kernel)
        return found

    def run(self, state: State | None, data: Iterable[int]) -> State | None:
        """The state after several bytes, or None."""
        for byte in data:
            if state is None:
                break
            state = self.step(state, byte)
        return state

    def _state_of(self, kernel: frozenset[Item]) -> State:
        found = self._states.get(kernel)
        if found is None:
            if len(self._states) >= MAX_KEPT:
                self._states.clear()
                self._frames.clear()
                self._equal.clear()
            made = self._closure(kernel)
            found = self._equal.setdefault((frozenset(made.moves), made.accepting), made)
            self._states[kernel] = found
        return found

    def _closure(self, kernel: frozenset[Item]) -> State:
        """Everything reached without reading: skips, returns of calls that have read something,
        then calls, outer rules first, so that all callers of a rule share one frame."""
        network = self.network
        moves: list[tuple[int, int, Frame]] = []
        pending: dict[int, set[Item]] = {}
        seen = self._reach(kernel, moves, pending, returns=True)
        while pending:
            rule = min(pending, key=network.ranks.__getitem__)
            callers = frozenset(pending.pop(rule))
            frame = self._frames.get(callers)
            if frame is None:
                frame = self._frames[callers] = Frame(tuple(callers))
            self._reach([(network.starts[rule], frame)], moves, pending, returns=False)
            if len(moves) > MAX_ITEMS:
                raise GrammarError(f"the grammar has more than {MAX_ITEMS} readings of a text")
        return State(moves, (network.accept, self._bottom) in seen)

    def _reach(
        self,
        items: Iterable[Item],
        moves: list[tuple[int, int, Frame]],
        pending: dict[int, set[Item]],
        returns: bool,
    ) -> set[Item]:
        """Follow skips, and returns if asked; collect moves and calls."""
        network = self.network
        all_skips, all_moves, all_calls = network.skips, network.moves, network.calls
        seen = set(items)
        todo = list(seen)
        while todo:
            state, frame = todo.pop()
            for bytes_, target in all_moves[state]:
                moves.append((bytes_, target, frame))
            for rule, target in all_calls[state]:
                callers = pending.setdefault(rule, set())
                if self._is_last(target):  # nothing follows: return straight to our own caller
                    callers.update(frame.returns)
                else:
                    callers.add((target, frame))
            on = [(target, frame) for target in all_skips[state]]
            if returns and network.is_end[state]:
                on += frame.returns
            for item in on:
                if item not in seen:
                    seen.add(item)
                    todo.append(item)
            if len(seen) > MAX_ITEMS:
                raise GrammarError(f"the grammar has more than {MAX_ITEMS} readings of a text")
        return seen

    def _is_last(self, state: int) -> bool:
        """Whether the only way on is the rule's end."""
        network = self.network
        while not network.is_end[state]:
            skips = network.skips[state]
            if len(skips) != 1 or network.moves[state] or network.calls[state]:
                return False
            state = skips[0]
        return True
