"""From rules to states: one network of byte moves and calls, trimmed to what can still end well.

Promises: every state of a network can reach its rule's end, so a set of states that is not empty is
a prefix of some text (no dead ends, an exact mask); no rule begins with itself; size and time are
bounded. Thompson's construction per rule; the subsets are built as they are visited, in `machine`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_vllm.structured_output.expressions import (
    Bytes,
    Call,
    Chars,
    Choice,
    Concat,
    Effort,
    Expression,
    Grammar,
    GrammarError,
    Literal,
    Repeat,
)
from mini_vllm.structured_output.utf8 import byte_sequences, byte_set

MAX_STATES = 60_000
"""Of one grammar: some 20 MB, half a second."""

_COPIED = 3
"""States of a body that a repeat copies in place; a larger one becomes a rule that is called."""


@dataclass(slots=True)
class Network:
    """States are numbers; state lists run parallel."""

    moves: list[list[tuple[int, int]]] = field(default_factory=list)
    """(byte set, target): read one byte of the set."""
    skips: list[list[int]] = field(default_factory=list)
    """Targets reached without reading."""
    calls: list[list[tuple[int, int]]] = field(default_factory=list)
    """(rule, target): read what a rule says, at least one byte of it."""
    starts: list[int] = field(default_factory=list)
    """By rule."""
    ends: list[int] = field(default_factory=list)
    """By rule; an end has no way on."""
    ranks: list[int] = field(default_factory=list)
    """By rule: a rule comes before those that it can begin with."""
    names: list[str] = field(default_factory=list)
    is_end: bytearray = field(default_factory=bytearray)
    entry: int = 0
    """Where texts begin."""
    accept: int = 0
    """Where a whole text may end."""


def compile_network(grammar: Grammar, effort: Effort | None = None) -> Network:
    """The network of a grammar.

    Args:
        grammar: rules without undefined names.
        effort: what may be spent.

    Raises:
        GrammarError: an undefined rule, a rule that begins with itself, no text at all, or more
            than `MAX_STATES` states.
    """
    builder = _Builder(grammar, effort or Effort())
    network = builder.build()
    builder.effort.check()
    _skip_empty_rules(network)
    _trim(network)
    network.ranks = _ranks(network)
    return network


class _Builder:
    def __init__(self, grammar: Grammar, effort: Effort) -> None:
        self.grammar, self.effort = grammar, effort
        self.network = Network()
        self.rules = {name: index for index, name in enumerate(grammar.rules)}
        self.bodies = list(grammar.rules.values())
        self.network.names = list(grammar.rules)
        self._made: dict[Expression, int] = {}

    def build(self) -> Network:
        network = self.network
        if self.grammar.root not in self.rules:
            raise GrammarError(f"rule {self.grammar.root!r}: not defined")
        network.entry, network.accept = self.state(), self.state()
        network.calls[network.entry].append((self.rules[self.grammar.root], network.accept))
        index = 0
        while index < len(self.bodies):  # repeats add rules on the way
            start = self.state()
            end = self.after(self.bodies[index], start)
            last = self.state()
            network.skips[end].append(last)
            network.starts.append(start)
            network.ends.append(last)
            network.is_end[last] = 1
            index += 1
        return network

    def state(self) -> int:
        network = self.network
        number = len(network.moves)
        if number >= MAX_STATES:
            raise GrammarError(f"the grammar needs more than {MAX_STATES} states")
        if number % 256 == 0:
            self.effort.check()
        network.moves.append([])
        network.skips.append([])
        network.calls.append([])
        network.is_end.append(0)
        return number

    def after(self, expression: Expression, start: int) -> int:
        """Add what reads `expression` from `start` on; the state behind it. Nothing leads into
        `start`, so that several expressions may begin there."""
        network = self.network
        if isinstance(expression, Literal):
            for byte in expression.data:
                network.moves[start].append((1 << byte, start := self.state()))
            return start
        if isinstance(expression, Chars):
            return self._chars(expression, start)
        if isinstance(expression, Bytes):
            network.moves[start].append((expression.allowed, end := self.state()))
            return end
        if isinstance(expression, Concat):
            for part in expression.parts:
                start = self.after(part, start)
            return start
        if isinstance(expression, Choice):
            end = self.state()
            words = [each.data for each in expression.options if isinstance(each, Literal)]
            self._words(words, start, end)
            for option in expression.options:
                if not isinstance(option, Literal):
                    network.skips[self.after(option, start)].append(end)
            return end
        if isinstance(expression, Repeat):
            return self._repeat(expression, start)
        if expression.rule not in self.rules:
            raise GrammarError(f"rule {expression.rule!r}: not defined")
        end = self.state()
        network.calls[start].append((self.rules[expression.rule], end))
        return end

    def _words(self, words: Sequence[bytes], start: int, end: int) -> None:
        """Any of some texts: what they begin with is shared."""
        behind: dict[bytes, int] = {b"": start}
        for word in words:
            known = next(n for n in range(len(word), -1, -1) if word[:n] in behind)
            state = behind[word[:known]]
            for index in range(known, len(word)):
                target = self.state()
                self.network.moves[state].append((1 << word[index], target))
                state = behind[word[: index + 1]] = target
            self.network.skips[state].append(end)

    def _chars(self, expression: Chars, start: int) -> int:
        end = self.state()
        behind: dict[tuple[tuple[int, int], ...], int] = {(): end}
        sets: dict[tuple[int, int], int] = defaultdict(int)
        for sequence in byte_sequences(expression.ranges):
            for index in range(len(sequence) - 1, 0, -1):
                rest = sequence[index:]
                if rest not in behind:
                    behind[rest] = self.state()
                    sets[behind[rest], behind[rest[1:]]] |= byte_set(*rest[0])
            sets[start, behind[sequence[1:]]] |= byte_set(*sequence[0])
        for (source, target), bytes_ in sets.items():
            self.network.moves[source].append((bytes_, target))
        return end

    def _repeat(self, repeat: Repeat, start: int) -> int:
        network, body = self.network, repeat.body
        copies = repeat.least + 1 if repeat.most is None else repeat.most
        if copies > 1 and self._size(body) > _COPIED:
            body = self._as_rule(body)
        for _ in range(repeat.least):
            start = self.after(body, start)
        if repeat.most is None:
            loop = self.state()
            network.skips[start].append(loop)
            network.skips[self.after(body, loop)].append(loop)
            out = self.state()
            network.skips[loop].append(out)
            return out
        end = self.state()
        for _ in range(repeat.most - repeat.least):
            network.skips[start].append(end)
            start = self.after(body, start)
        network.skips[start].append(end)
        return end

    def _as_rule(self, body: Expression) -> Call:
        """A rule of its own for a body that is wanted many times."""
        if isinstance(body, Call):
            return body
        if body not in self._made:
            self._made[body] = len(self.bodies)
            name = f"repeat {len(self._made)}"
            self.rules[name] = len(self.bodies)
            self.bodies.append(body)
            self.network.names.append(name)
        return Call(self.network.names[self._made[body]])

    def _size(self, expression: Expression) -> int:
        """About how many states the expression takes, as far as it matters."""
        if isinstance(expression, Literal):
            return len(expression.data)
        if isinstance(expression, Chars):
            return 1 if expression.ranges and expression.ranges[-1][1] < 128 else 8
        if isinstance(expression, Concat):
            return sum(map(self._size, expression.parts[: _COPIED + 1]))
        if isinstance(expression, Choice):
            return 1 + sum(map(self._size, expression.options[: _COPIED + 1]))
        if isinstance(expression, Bytes | Call):
            return 1
        copies = expression.least + 1 if expression.most is None else expression.most
        return 1 + min(copies, _COPIED) * self._size(expression.body)


def _skip_empty_rules(network: Network) -> None:
    """A call of a rule that has the empty text may be skipped, so that the rule itself need not
    say so: calls then always read something."""
    sites: dict[int, list[tuple[int, int]]] = defaultdict(list)
    into: dict[int, list[int]] = defaultdict(list)
    for state, calls in enumerate(network.calls):
        for rule, target in calls:
            sites[rule].append((state, target))
        for target in network.skips[state]:
            into[target].append(state)
    of_start: dict[int, list[int]] = defaultdict(list)
    for rule, start in enumerate(network.starts):
        of_start[start].append(rule)
    reaches = bytearray(len(network.moves))  # its rule's end, without reading
    todo = list(network.ends)
    while todo:
        state = todo.pop()
        if reaches[state]:
            continue
        reaches[state] = 1
        todo += into[state]
        for rule in of_start[state]:
            for source, target in sites[rule]:
                network.skips[source].append(target)
                into[target].append(source)
                if reaches[target]:
                    todo.append(source)


def _trim(network: Network) -> None:
    """Drop every way that cannot reach its rule's end."""
    into: dict[int, list[int]] = defaultdict(list)
    for state in range(len(network.moves)):
        for target in network.skips[state]:
            into[target].append(state)
        for bytes_, target in network.moves[state]:
            if bytes_:
                into[target].append(state)
    behind: dict[int, list[tuple[int, int]]] = defaultdict(list)
    of_rule: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for state, calls in enumerate(network.calls):
        for rule, target in calls:
            behind[target].append((state, rule))
            of_rule[rule].append((state, target))
    of_start = {start: rule for rule, start in enumerate(network.starts)}
    lives = bytearray(len(network.moves))
    todo = [*network.ends, network.accept]
    while todo:
        state = todo.pop()
        if lives[state]:
            continue
        lives[state] = 1
        todo += into[state]
        todo += [source for source, rule in behind[state] if lives[network.starts[rule]]]
        if state in of_start:
            todo += [source for source, target in of_rule[of_start[state]] if lives[target]]
    if not lives[network.entry]:
        raise GrammarError("the grammar has no text: nothing could be generated")
    for state in range(len(lives)):
        network.moves[state] = [(b, t) for b, t in network.moves[state] if b and lives[t]]
        network.skips[state] = [t for t in dict.fromkeys(network.skips[state]) if lives[t]]
        network.calls[state] = [
            (r, t) for r, t in network.calls[state] if lives[t] and lives[network.starts[r]]
        ]


def _ranks(network: Network) -> list[int]:
    """Order the rules so that each comes before those it can begin with."""
    begins: list[list[int]] = []
    for start in network.starts:
        seen, todo, called = {start}, [start], []
        while todo:
            state = todo.pop()
            called += [rule for rule, _ in network.calls[state]]
            fresh = [target for target in network.skips[state] if target not in seen]
            seen.update(fresh)
            todo += fresh
        begins.append(list(dict.fromkeys(called)))
    ranks, mark = [0] * len(begins), bytearray(len(begins))  # mark: 1 open, 2 done
    next_rank = len(begins)
    for root in range(len(begins)):
        path: list[tuple[int, int]] = [] if mark[root] else [(root, 0)]
        mark[root] = mark[root] or 1
        while path:
            rule, index = path.pop()
            if index == len(begins[rule]):
                mark[rule] = 2
                next_rank -= 1
                ranks[rule] = next_rank
                continue
            path.append((rule, index + 1))
            called_rule = begins[rule][index]
            if mark[called_rule] == 1:
                raise GrammarError(
                    f"rule {network.names[called_rule]!r}: begins with itself (left recursion is "
                    "not supported)"
                )
            if not mark[called_rule]:
                mark[called_rule] = 1
                path.append((called_rule, 0))
    return ranks
