"""The mini engine on the recorded walks through structural tags and the recorded runs with them.

    python -m conformance.features.structured_output.tags_replay [--write]

Counts what they hold, on how many specifications each wrong reading differs, and in how many runs
each wrong treatment; `--write` puts the tables into the README.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from conformance import parts
from conformance.features.structured_output import reasoning_replay
from conformance.features.structured_output.reasoning_replay import FULL, expected
from conformance.mutants import Mutant, diffs, found_in, sources
from labkit.tables import markdown_table, write_section
from mini_vllm.structured_output import StructuredOutputsConfig, StructuredOutputsParams
from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.expressions import GrammarError
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.masks import row_of
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.vocabulary import Vocabulary
from mini_vllm.tokenizer import ByteTokenizer

README = Path(__file__).with_name("README.md")
CONFIG = StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)


@functools.cache
def recorded() -> tuple[dict[str, Vocabulary], list[dict[str, Any]], list[dict[str, Any]]]:
    """The vocabularies by name, the walks, and what the real code says of specifications."""
    known: dict[str, Vocabulary] = {}
    walks, door = list[dict[str, Any]](), list[dict[str, Any]]()
    for case in parts.load("grammar_tags"):
        if "tokens" in case:
            tokens = [bytes.fromhex(token) for token in case["tokens"]]
            known[case["vocabulary"]] = Vocabulary(tokens, [case["eos"]])
        else:
            (walks if "texts" in case else door).append(case)
    return known, walks, door


def machine_of(spec: Any) -> Machine:
    """Raises GrammarError: refused here."""
    asked = StructuredOutputsParams(structural_tag=json.dumps(spec))
    return Machine(compile_network(grammar_of(asked.key(CONFIG), refuse_as_xgrammar=True)))


def is_taken(spec: Any) -> bool:
    """Whether the mini engine takes a specification."""
    try:
        machine_of(spec)
    except GrammarError:
        return False
    return True


def differences(case: dict[str, Any]) -> Iterator[tuple[list[int], str]]:
    """The texts after which the mini engine's mask or verdict is another, and what differs."""
    vocabulary = recorded()[0][case["vocabulary"]]
    masks = [int(mask, 16) for mask in case["masks"]]
    machine = machine_of(case["spec"])
    for text, real, (token, taken) in zip(case["texts"], case["real"], case["last"], strict=True):
        matcher = Matcher(machine, vocabulary)
        for index, number in enumerate(real):
            state = matcher.state
            assert state is not None
            mine = int.from_bytes(row_of(machine, state, vocabulary).tobytes(), "little")
            if mine != masks[number]:
                yield text[:index], "mask"
            if not matcher.accept_tokens("", text[index : index + 1]):
                yield text[: index + 1], "token"
                break
        else:
            if matcher.accept_tokens("", [token]) != taken:
                yield [*text, token], "last"


def differing(which: Sequence[dict[str, Any]]) -> list[str]:
    """The specifications on whose walks anything differs."""
    found = []
    for case in which:
        try:
            differs = any(differences(case))
        except GrammarError:
            differs = True
        if differs:
            found.append(f"{case['name']}, {case['vocabulary']}")
    return found


def told() -> dict[str, int]:
    """What the recording holds."""
    known, walks, door = recorded()
    counts = Counter[str]()
    for case in walks:
        vocabulary = known[case["vocabulary"]]
        every = sum(1 << t for t, data in enumerate(vocabulary.token_bytes) if data)
        is_free = [int(mask, 16) & every == every for mask in case["masks"]]
        ends = [bool(int(mask, 16) & vocabulary.eos) for mask in case["masks"]]
        counts[f"specifications, {case['vocabulary']}"] += 1
        for text, real, (_, taken) in zip(case["texts"], case["real"], case["last"], strict=True):
            free = [is_free[number] for number in real]
            counts["walks"] += 1
            counts["prefixes, each with its mask"] += len(text) + 1
            counts["walks from free text into a tag"] += (True, False) in pairwise(free)
            counts["walks from a tag into free text"] += (False, True) in pairwise(free)
            counts["walks that may end where they end"] += ends[real[-1]]
            counts["last tokens that are taken"] += taken
            counts["last tokens that are refused"] += not taken
    for case in door[:-1]:
        mine = is_taken(case["spec"])
        verdict = "takes" if case["taken"] else "refuses"
        here = "here too" if mine == case["taken"] else "not here"
        counts[f"specifications that the pin's door {verdict}, {here}"] += 1
    return dict(counts)


@functools.cache
def runs() -> Sequence[dict[str, Any]]:
    return parts.load("grammar_tags_runs")


def differing_runs(which: Sequence[dict[str, Any]]) -> list[int]:
    """The runs in which a plan, a draft, a mask, a text or an end differs."""
    return [number for number, case in enumerate(which) if replayed(case) != expected(case)]


def replayed(case: dict[str, Any]) -> dict[str, Any]:
    """What the mini engine makes of a run, in the recording's words."""
    if "parser" in case["config"]:
        return reasoning_replay.replayed(case, "structural_tag")
    return reasoning_replay.played(case, ByteTokenizer(), {}, "structural_tag")


def told_of_runs() -> dict[str, int]:
    """What the runs hold: runs, then requests."""
    counts = Counter[str]()
    for case in runs():
        ahead = "ahead" if case["config"]["async_scheduling"] else "not ahead"
        drafts = "drafts" if "speculative" in case["config"] else "no drafts"
        counts[f"{ahead}, {drafts}"] += 1
        counts["with a reasoning parser"] += "parser" in case["config"]
        for name, masks in case["masks"].items():
            free = [int(mask, 16) == FULL for mask in masks]
            offered = [drafts[name] for _, drafts in case["steps"] if name in drafts]
            counts["requests"] += 1
            counts["end with an error"] += case["reasons"][name] == "error"
            counts["go from free text into a tag"] += (True, False) in pairwise(free)
            counts["come from a tag into free text"] += (False, True) in pairwise(free)
            counts["have a draft refused"] += any(-1 in each for each in offered)
            counts["have one refused behind a good one"] += any(
                each[0] >= 0 and -1 in each for each in offered
            )
    return dict(counts)


WRONG = diffs(
    """
looks for a trigger at the beginning of what it read alone
@ structured_output.structural_tag
-                    kept = next(read[n:] for n in range(len(read) + 1) if read[n:] in begins)
+                    kept = read if read in begins else b""

does not follow a trigger that begins again inside of itself
@ structured_output.structural_tag
-                    kept = next(read[n:] for n in range(len(read) + 1) if read[n:] in begins)
+                    kept = next(r for r in (read, read[-1:], b"") if r in begins)

does not look for a trigger across tokens
@ structured_output.structural_tag
-                    targets[kept] |= bit
+                    targets[b""] |= bit

lets no text end where a trigger may have begun
@ structured_output.structural_tag
-            options: list[Expression] = [EMPTY]
+            options: list[Expression] = [EMPTY] if not state else []

lets free text pass a trigger
@ structured_output.structural_tag
-                if not found:
+                if True:

takes the first tag of a shared trigger alone
@ structured_output.structural_tag
-        after = {t: choice(self.tag(each, t) for each in those) for t, those in tags.items()}
+        after = {t: self.tag(those[0], t) for t, those in tags.items()}

reads the trigger once more
@ structured_output.structural_tag
-        return concat(text(begin[len(trigger) :]), content, choice(map(text, ends)))
+        return concat(text(begin), content, choice(map(text, ends)))

takes a tag without its end
@ structured_output.structural_tag
-        return concat(text(begin[len(trigger) :]), content, choice(map(text, ends)))
+        ends = [*ends, ""]
+        return concat(text(begin[len(trigger) :]), content, choice(map(text, ends)))

takes the first of several ends alone
@ structured_output.structural_tag
-        return concat(text(begin[len(trigger) :]), content, choice(map(text, ends)))
+        return concat(text(begin[len(trigger) :]), content, text(ends[0]))

constrains after a tag's end
@ structured_output.structural_tag
-        again = Call(names[b""]) if goes_on else EMPTY
+        again = EMPTY

goes on after the only tag
@ structured_output.structural_tag
-        again = Call(names[b""]) if goes_on else EMPTY
+        again = Call(names[b""])

begins with text where a tag is due
@ structured_output.structural_tag
-        return concat(first, free) if known["at_least_one"] else free
+        return free

lets text hold the end of the tag around it
@ structured_output.structural_tag
-        content = self.format(known["content"], seen)
+        content = self.format(known["content"], ())

reads characters where xgrammar reads bytes
@ structured_output.structural_tag
-            targets[b""] = ALL_BYTES
+            targets[b""] = (1 << 128) - 1

reads bytes where xgrammar reads characters
@ structured_output.structural_tag
-            return self.text(excludes, {}) if excludes else Repeat(ANY_CHAR, 0, None)
+            return self.text(excludes, {}) if excludes else Repeat(Bytes(ALL_BYTES), 0, None)

forgets what text may not hold
@ structured_output.structural_tag
-                if any(read.endswith(each) for each in forbidden):
+                if False:

mixes up the rules of two schemas
@ structured_output.structural_tag
-            prefix = f"schema {len(self._schemas)} "
+            prefix = "schema "

writes JSON without space where the engine's config asks for it
@ structured_output.params
-            return "structural_tag", self.structural_tag, False, True
+            return "structural_tag", self.structural_tag, compact, True
"""
)


def caught(mutant: Mutant) -> int:
    """On how many specifications an engine with the mutant's parts differs."""
    find = found_in(sources(mutant))
    parse = find("structured_output.structural_tag", "parse_structural_tag")
    params = find("structured_output.params", "StructuredOutputsParams")
    with (
        mock.patch("mini_vllm.structured_output.structural_tag.parse_structural_tag", parse),
        mock.patch(f"{__name__}.StructuredOutputsParams", params),
    ):
        return len(differing(recorded()[1]))


WRONG_RUNS = diffs(
    """
takes free text for no constraint
@ structured_output.manager
-        forbidden = constraint.matcher.forbidden()
+        state = constraint.matcher.state
+        is_free = state is not None and state.allowed == (1 << 256) - 1
+        forbidden = None if is_free else constraint.matcher.forbidden()

lets every draft through while text is free
@ structured_output.manager
-        valid = matcher.validate_tokens(drafts) if accepted else []
+        is_free = matcher.state is not None and matcher.state.allowed == (1 << 256) - 1
+        valid = matcher.validate_tokens(drafts) if accepted and not is_free else drafts

vets drafts as if nothing were in flight
@ structured_output.manager
-        accepted = matcher.accept_tokens(request.request_id, in_flight)
+        accepted = True

stays behind the drafts that it vetted
@ structured_output.manager
-        matcher.rollback(matcher.num_accepted - before)
+        pass

lets no structural tag read the step that ends the reasoning
@ structured_output.request
-        self.reads_last_step = has_drafts and key[0] == "structural_tag"
+        self.reads_last_step = False

reads the step that ends the reasoning without drafts as well
@ structured_output.request
-        self.reads_last_step = has_drafts and key[0] == "structural_tag"
+        self.reads_last_step = key[0] == "structural_tag"

reads the mark alone of the step that ends the reasoning
@ structured_output.request
-            self.reads_from = self.num_begun if self.reads_last_step else request.num_tokens
+            self.reads_from = request.num_tokens - self.reads_last_step

reads two steps where the second one ends the reasoning in flight
@ structured_output.request
-            steps.append((self.step_start, len(tokens) + len(in_flight)))
+            steps.append((len(tokens), len(tokens) + len(in_flight)))

does not come back over refused drafts
@ structured_output.request
-            matcher.rollback(len(known) - same)
+            pass
"""
)


def caught_in_runs(mutant: Mutant) -> int:
    """In how many runs an engine with the mutant's classes differs."""
    find = found_in(sources(mutant))
    names = {"request": "Constraint", "manager": "StructuredOutputManager"}
    classes = {name: find(f"structured_output.{module}", name) for module, name in names.items()}
    with mock.patch.multiple("mini_vllm.structured_output.manager", **classes):
        return len(differing_runs(runs()))


def main() -> int:
    """All tables."""
    held, ran = ([[n, f"{c:,}"] for n, c in each.items()] for each in (told(), told_of_runs()))
    wrong = [[each.name, str(caught(each))] for each in WRONG]
    wrong_runs = [[each.name, str(caught_in_runs(each))] for each in WRONG_RUNS]
    tables = {
        "grammar-tags": markdown_table(["the recording", "how many"], held),
        "grammar-tags-mutants": markdown_table(["an engine that", "specifications"], wrong),
        "grammar-tags-runs": markdown_table(["the runs", "how many"], ran),
        "grammar-tags-runs-mutants": markdown_table(["an engine that", "runs"], wrong_runs),
    }
    for name, text in tables.items():
        print(text)
        if "--write" in sys.argv:
            write_section(name, text, README)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
