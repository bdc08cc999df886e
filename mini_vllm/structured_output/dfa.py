"""Deterministic automata over characters: for what several conditions say of one string.

Promises: languages can be intersected and taken away from one another, which expressions cannot;
what comes out is returned as rules, one per state. Textbook constructions (Hopcroft and Ullman,
1979): subsets, products, and only states from which the end can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mini_vllm.structured_output.expressions import (
    EMPTY,
    Call,
    Chars,
    Choice,
    Concat,
    Effort,
    Expression,
    GrammarError,
    Literal,
    Repeat,
    choice,
    concat,
    normal,
)

MAX_STATES = 4000
"""Of one automaton, on the way too."""

Edge = tuple[int, int, int]
"""First and last code point, and the target."""


@dataclass(frozen=True, slots=True)
class Dfa:
    """State 0 is the start. A character without an edge leads nowhere."""

    edges: tuple[tuple[Edge, ...], ...]
    accepting: frozenset[int]

    def accepts(self, text: str) -> bool:
        """Whether the text is in the language."""
        state: int | None = 0 if self.edges else None
        for char in map(ord, text):
            if state is None:
                return False
            state = next((t for low, high, t in self.edges[state] if low <= char <= high), None)
        return state in self.accepting

    @property
    def is_empty(self) -> bool:
        """Whether there is no text at all."""
        return not self.accepting

    def rules(
        self, name: str, spell: Callable[[tuple[tuple[int, int], ...]], Expression]
    ) -> dict[str, Expression]:
        """A rule per state, the start's called `name`.

        Args:
            name: of the start; the others get a number behind it.
            spell: how a character of a class is written.
        """
        names = [name, *(f"{name} {state}" for state in range(1, len(self.edges)))]
        found: dict[str, Expression] = {}
        for state, edges in enumerate(self.edges):
            options: list[Expression] = [EMPTY] if state in self.accepting else []
            for target in dict.fromkeys(target for _, _, target in edges):
                ranges = normal((low, high) for low, high, t in edges if t == target)
                options.append(concat(spell(ranges), Call(names[target])))
            found[names[state]] = Choice(tuple(options))
        return found


def dfa_of(expression: Expression, effort: Effort) -> Dfa:
    """The automaton of an expression without calls.

    Raises:
        GrammarError: too large.
    """
    builder = _Builder(effort)
    start = builder.state()
    end = builder.after(expression, start)
    return _subsets(builder, start, end, effort)


def combined(parts: Sequence[tuple[Dfa, bool]], effort: Effort) -> Dfa:
    """The texts that are in each automaton marked True and in none marked False.

    Raises:
        GrammarError: too large.
    """
    start: tuple[int | None, ...] = tuple(0 if dfa.edges else None for dfa, _ in parts)
    known = {start: 0}
    todo, all_edges, accepting = [start], [], set()
    for states in todo:
        if len(known) > MAX_STATES:
            raise GrammarError(f"the strings' conditions need more than {MAX_STATES} states")
        effort.check()
        if all((s in dfa.accepting) == wanted for s, (dfa, wanted) in zip(states, parts,
                                                                         strict=True)):  # fmt: skip
            accepting.add(known[states])
        cuts = {0}
        for state, (dfa, _) in zip(states, parts, strict=True):
            for low, high, _ in dfa.edges[state] if state is not None else ():
                cuts |= {low, high + 1}
        bounds = [*sorted(cut for cut in cuts if cut <= 0x10FFFF), 0x110000]
        edges: list[Edge] = []
        for low, after in pairwise(bounds):
            target = tuple(
                None
                if state is None
                else next((t for a, b, t in dfa.edges[state] if a <= low <= b), None)
                for state, (dfa, _) in zip(states, parts, strict=True)
            )
            if any(t is None and wanted for t, (_, wanted) in zip(target, parts, strict=True)):
                continue
            if target not in known:
                known[target] = len(known)
                todo.append(target)
            edges.append((low, after - 1, known[target]))
        all_edges.append(edges)
    return _trimmed(all_edges, accepting)


class _Builder:
    """Thompson's construction over characters."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.edges: list[list[Edge]] = []
        self.skips: list[list[int]] = []

    def state(self) -> int:
        if len(self.edges) >= 4 * MAX_STATES:
            raise GrammarError(f"the string's pattern needs more than {4 * MAX_STATES} states")
        if len(self.edges) % 256 == 0:
            self.effort.check()
        self.edges.append([])
        self.skips.append([])
        return len(self.edges) - 1

    def after(self, expression: Expression, start: int) -> int:
        if isinstance(expression, Literal):
            for char in expression.data.decode():
                target = self.state()
                self.edges[start].append((ord(char), ord(char), target))
                start = target
            return start
        end = self.state()
        if isinstance(expression, Chars):
            self.edges[start] += [(low, high, end) for low, high in expression.ranges]
        elif isinstance(expression, Concat):
            for part in expression.parts:
                start = self.after(part, start)
            self.skips[start].append(end)
        elif isinstance(expression, Choice):
            for option in expression.options:
                self.skips[self.after(option, start)].append(end)
        elif isinstance(expression, Repeat):
            for _ in range(expression.least):
                start = self.after(expression.body, start)
            if expression.most is None:
                loop = self.state()
                self.skips[start].append(loop)
                self.skips[self.after(expression.body, loop)].append(loop)
                start = loop
            else:
                for _ in range(expression.most - expression.least):
                    self.skips[start].append(end)
                    start = self.after(expression.body, start)
            self.skips[start].append(end)
        else:
            raise GrammarError(f"{expression} inside of a string")
        return end


def _subsets(builder: _Builder, start: int, end: int, effort: Effort) -> Dfa:
    def closure(states: set[int]) -> frozenset[int]:
        todo = list(states)
        while todo:
            fresh = [t for t in builder.skips[todo.pop()] if t not in states]
            states.update(fresh)
            todo += fresh
        return frozenset(states)

    first = closure({start})
    known, todo = {first: 0}, [first]
    all_edges: list[list[Edge]] = []
    for states in todo:
        if len(known) > MAX_STATES:
            raise GrammarError(f"the string's pattern needs more than {MAX_STATES} states")
        effort.check()
        found = [edge for state in states for edge in builder.edges[state]]
        bounds = sorted({low for low, _, _ in found} | {high + 1 for _, high, _ in found})
        edges: list[Edge] = []
        for low, after in pairwise(bounds):
            targets = {t for a, b, t in found if a <= low <= b}
            if targets:
                target = closure(targets)
                if target not in known:
                    known[target] = len(known)
                    todo.append(target)
                edges.append((low, after - 1, known[target]))
        all_edges.append(edges)
    return _trimmed(all_edges, {number for states, number in known.items() if end in states})


def _trimmed(edges: Sequence[Sequence[Edge]], accepting: set[int]) -> Dfa:
    """Only what the end can be reached from, numbered anew; neighbouring ranges joined."""
    into: dict[int, set[int]] = {}
    for state, outgoing in enumerate(edges):
        for _, _, target in outgoing:
            into.setdefault(target, set()).add(state)
    alive, todo = set(accepting), list(accepting)
    while todo:
        fresh = into.get(todo.pop(), set()) - alive
        alive |= fresh
        todo += fresh
    if 0 not in alive:
        return Dfa((), frozenset())
    order = sorted(alive)
    number: Mapping[int, int] = {state: index for index, state in enumerate(order)}
    kept: list[tuple[Edge, ...]] = []
    for state in order:
        joined: list[Edge] = []
        for low, high, target in edges[state]:
            if target not in alive:
                continue
            if joined and joined[-1][1] + 1 == low and joined[-1][2] == number[target]:
                joined[-1] = joined[-1][0], high, number[target]
            else:
                joined.append((low, high, number[target]))
        kept.append(tuple(joined))
    return Dfa(tuple(kept), frozenset(number[state] for state in accepting if state in alive))


def one_of(texts: Sequence[str], effort: Effort) -> Dfa:
    """Exactly these texts."""
    return dfa_of(choice(Literal(text.encode()) for text in texts), effort)
