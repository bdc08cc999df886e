"""From a constraint to a machine: parsed at the door, compiled in the background, kept by key.

Promises: a constraint that cannot be served is refused by name before a request exists; parsing and
compiling are bounded in time and size, and a compilation ends early when no request waits for it;
equal constraints are compiled once. Mirrors `vllm/v1/structured_output/__init__.py:115`
`StructuredOutputManager.grammar_init` and its pool, and the cache that xgrammar's compiler keeps.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from mini_vllm.structured_output.expressions import (
    Effort,
    Grammar,
    GrammarError,
    choice,
    text,
)
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.masks import row_of
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.params import Key
from mini_vllm.structured_output.regex import parse_regex
from mini_vllm.structured_output.vocabulary import Vocabulary

MAX_SPEC = 1 << 20
"""Characters of a constraint."""

MAX_GRAMMARS = 128
"""Compiled grammars that are kept, the least recently used go first."""

MAX_KEPT_STATES = 250_000
"""States of all grammars that are kept, at some 400 bytes each."""


def num_workers() -> int:
    """Threads that compile: half of the processors, as upstream."""
    return max(1, ((os.cpu_count() or 1) + 1) // 2)


def grammar_of(key: Key, refuse_as_xgrammar: bool = False, effort: Effort | None = None) -> Grammar:
    """Parse a constraint.

    Args:
        key: see `StructuredOutputsParams.key`.
        refuse_as_xgrammar: refuse the keywords that upstream refuses for xgrammar.
        effort: what may be spent.

    Raises:
        GrammarError: malformed, too long, or not supported.
    """
    try:
        return _parsed(key, refuse_as_xgrammar, effort or Effort())
    except RecursionError:
        raise GrammarError(f"{key[0]}: nested too deeply") from None


def _parsed(key: Key, refuse_as_xgrammar: bool, effort: Effort) -> Grammar:
    kind, spec, compact, closed = key
    if len(spec) > MAX_SPEC:
        raise GrammarError(f"{kind}: {len(spec)} characters, need at most {MAX_SPEC}")
    if kind == "regex":
        return Grammar({"root": parse_regex(spec, effort)})
    if kind == "choice":
        return Grammar({"root": choice(text(each) for each in json.loads(spec))})
    if kind == "grammar":
        from mini_vllm.structured_output.ebnf import parse_ebnf

        return parse_ebnf(spec, effort)
    if kind == "json":
        from mini_vllm.structured_output.json_schema import parse_json_schema

        schema = json.loads(spec)
        return parse_json_schema(schema, compact, closed, refuse_as_xgrammar, effort)
    if kind == "structural_tag":
        from mini_vllm.structured_output.json_schema import parse_json_schema
        from mini_vllm.structured_output.structural_tag import parse_structural_tag

        return parse_structural_tag(
            spec,
            lambda schema: parse_json_schema(schema, compact, closed, refuse_as_xgrammar, effort),
            effort,
        )
    raise GrammarError(f"{kind}: not supported")


@dataclass(slots=True)
class CompiledGrammar:
    """A machine and the vocabulary it speaks."""

    machine: Machine
    vocabulary: Vocabulary

    def matcher(self) -> Matcher:
        """At the beginning, for one request."""
        return Matcher(self.machine, self.vocabulary)


@dataclass(slots=True)
class Compilation:
    """A grammar on its way, and how many wait for it."""

    key: Key
    future: Future[CompiledGrammar]
    effort: Effort = field(default_factory=Effort)
    waiters: int = 0

    @property
    def num_states(self) -> int:
        """How many states it holds; 0 until it is done."""
        if not self.future.done() or self.future.cancelled() or self.future.exception():
            return 0
        machine = self.future.result().machine
        return len(machine.network.moves) + machine.num_states


class GrammarParser:
    """Parses, in any thread, and keeps what it parsed last, so that a thread which must not be held
    up finds it."""

    def __init__(self, refuse_as_xgrammar: bool) -> None:
        self.refuse_as_xgrammar = refuse_as_xgrammar
        self._kept: OrderedDict[Key, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def parse(self, key: Key) -> Grammar:
        """The grammar of a constraint. Raises GrammarError, see `grammar_of`."""
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        grammar = grammar_of(key, self.refuse_as_xgrammar)
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > 1 and sum(len(k[1]) for k in self._kept) > 2 * MAX_SPEC:
                self._kept.popitem(last=False)
        return grammar


class GrammarCompiler:
    """A pool of threads and what they made."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is asked for once, in the pool, with the first grammar."""
        self._open = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[Key, Compilation] = OrderedDict()
        self.num_compiled = 0
        """Compilations begun; a constraint seen before needs none."""

    def submit(self, key: Key, grammar: Grammar) -> Compilation:
        """Begin to compile, or find what is compiled or under way. Every call needs a `release`."""
        found = self._kept.get(key)
        if found is not None and found.future.done() and found.future.exception():
            found = None  # time may have been short: try again
        if found is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(num_workers(), "grammar")
            effort = Effort()
            found = Compilation(key, self._pool.submit(self._compile, grammar, effort), effort)
            self._kept[key] = found
            self.num_compiled += 1
        self._kept.move_to_end(key)
        found.waiters += 1
        self._shrink()
        return found

    def release(self, compilation: Compilation) -> None:
        """One waits no longer. What nobody waits for and is not done is given up."""
        compilation.waiters -= 1
        if compilation.waiters == 0 and not compilation.future.done():
            compilation.effort.cancelled = True
            compilation.future.cancel()
            if self._kept.get(compilation.key) is compilation:
                del self._kept[compilation.key]

    def _shrink(self) -> None:
        """Forget what was not used for longest, down to both bounds; nothing that is in use."""
        num_states = sum(each.num_states for each in self._kept.values())
        for key, each in list(self._kept.items()):
            if len(self._kept) <= MAX_GRAMMARS and num_states <= MAX_KEPT_STATES:
                break
            if each.waiters == 0:
                num_states -= each.num_states
                del self._kept[key]

    def _compile(self, grammar: Grammar, effort: Effort) -> CompiledGrammar:
        if self._vocabulary is None:
            self._vocabulary = self._open()
        effort.seconds = Effort().seconds  # parsing does not count
        machine = Machine(compile_network(grammar, effort))
        row_of(machine, machine.initial, self._vocabulary)
        return CompiledGrammar(machine, self._vocabulary)
