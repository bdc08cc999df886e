"""Grammars: what the recordings hold, which wrong treatments they catch, and the peers' masks."""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import parts
from conformance.features.structured_output import suite as grammar_suite
from conformance.features.structured_output import texts as structured_texts
from mini_vllm.structured_output import expressions
from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.expressions import GrammarError
from mini_vllm.structured_output.formats import FORMATS
from mini_vllm.structured_output.json_schema import refused_by_xgrammar
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.masks import row_of
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.vocabulary import Vocabulary, token_bytes_of

# ------------------------------------------------------------------ masks

SURROGATES = sum(1 << byte for byte in range(0xA0, 0xC0))
"""What xgrammar lets follow byte 0xED besides: half of a surrogate pair, which RFC 3629 forbids."""


@functools.cache
def mask_cases() -> tuple[dict[str, Vocabulary], list[dict[str, Any]]]:
    known: dict[str, Vocabulary] = {}
    cases = []
    for case in parts.load("grammar_masks"):
        if "tokens" in case:
            tokens = [bytes.fromhex(token) for token in case["tokens"]]
            known[case["vocabulary"]] = Vocabulary(tokens, [case["eos"]])
        else:
            cases.append(case)
    return known, cases


def ours(case: dict[str, Any]) -> Iterator[tuple[list[int], int, int, int]]:
    """Prefix, and the masks of the mini engine, xgrammar and llguidance after it."""
    vocabulary = mask_cases()[0][case["vocabulary"]]
    spec = case["spec"] if case["kind"] == "regex" else json.dumps(case["spec"])
    machine = Machine(compile_network(grammar_of((case["kind"], spec, False, False))))
    masks = [int(mask, 16) for mask in case["masks"]]
    peers = zip(case["xgrammar"], case["llguidance"] or case["xgrammar"], strict=True)
    for text, (theirs, others) in zip(case["texts"], peers, strict=True):
        matcher = Matcher(machine, vocabulary)
        for index in range(len(text) + 1):
            row = row_of(machine, matcher.state, vocabulary).tobytes()
            found = int.from_bytes(row, "little")
            yield text[:index], found, masks[theirs[index]], masks[others[index]]
            assert matcher.accept_tokens("", text[index : index + 1])


def test_over_bytes_the_masks_are_those_of_both_libraries_after_every_prefix() -> None:
    counts = Counter[str]()
    for case in mask_cases()[1]:
        if case["vocabulary"] == "bytes":
            counts["constraints"] += 1
            counts["texts"] += len(case["texts"])
            for prefix, mine, xgrammar, llguidance in ours(case):
                counts["prefixes"] += 1
                assert mine == llguidance, (case["spec"], prefix)
                if mine != xgrammar:
                    counts["surrogates"] += 1
                    assert prefix[-1] == 0xED and mine | SURROGATES == xgrammar
    assert counts["constraints"] >= 60 and counts["texts"] >= 2000
    assert counts["prefixes"] > 10_000 and counts["surrogates"] == 7


def test_over_words_the_masks_are_xgrammars_and_llguidances_where_it_has_a_choice() -> None:
    """Where the text is forced, llguidance allows the one token that it would write itself."""
    counts = Counter[str]()
    for case in mask_cases()[1]:
        if case["vocabulary"] == "words":
            for prefix, mine, xgrammar, llguidance in ours(case):
                counts["prefixes"] += 1
                assert mine == xgrammar, (case["spec"], prefix)
                if mine != llguidance:
                    counts["forced"] += 1
                    assert llguidance.bit_count() == 1 and llguidance | mine == mine
    assert counts["prefixes"] > 1000 and 0 < counts["forced"] < counts["prefixes"] / 10


def test_the_bytes_of_a_byte_level_vocabulary_are_those_that_xgrammar_decodes() -> None:
    for case in parts.load("grammar_masks"):
        if case.get("words"):
            backend = SimpleNamespace(
                to_str=lambda: '{"decoder": {"type": "ByteLevel"}}',
                get_vocab=lambda words=case["words"]: {w: i for i, w in enumerate(words)},
                get_added_tokens_decoder=lambda: {0: SimpleNamespace(special=True)},
            )
            found = token_bytes_of(backend)
            assert found[0] is None and len(found) == 1200
            assert [token.hex() for token in found[1:] if token] == case["tokens"][1:]
            return
    raise AssertionError("no vocabulary of words")


# ------------------------------------------------------------------ JSON Schema, and whole texts


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are counted, so a busy machine must not refuse a schema for its time."""
    monkeypatch.setattr(expressions, "COMPILE_SECONDS", math.inf)


def tallied(cases: list[dict[str, Any]]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Our verdicts on some schemas of the published suite, and those of each library."""
    sums = Counter[str]()
    theirs: dict[str, Counter[str]] = {}
    for case in cases:
        sums.update(grammar_suite.tally(case, grammar_suite.judge(False, case)))
        for name, verdicts in case["verdicts"].items():
            theirs.setdefault(name, Counter()).update(grammar_suite.tally(case, verdicts))
    return sums, theirs


@pytest.mark.slow
@pytest.mark.usefixtures("no_clock")
def test_on_a_quarter_of_the_published_suite_no_verdict_is_wrong_here_and_some_are_there() -> None:
    sums, theirs = tallied(parts.load("grammar_suite")[::4])
    assert sums["right"] > 200 and sums["too strict"] + sums["too loose"] == 0
    for name, peer in theirs.items():
        assert peer["too strict"] + peer["too loose"] > 0, name


@pytest.mark.slow
@pytest.mark.usefixtures("no_clock")
def test_the_published_suite_has_no_wrong_verdict_here_and_many_there() -> None:
    sums, theirs = tallied(parts.load("grammar_suite"))
    assert (sums["right"], sums["too strict"], sums["too loose"]) == (1098, 0, 0)
    assert sums["refused"] == 159
    for name, peer in theirs.items():
        assert peer["too strict"] + peer["too loose"] > 0 and peer["right"] < 1098, name


@pytest.mark.slow
@pytest.mark.usefixtures("no_clock")
def test_where_both_libraries_agree_the_language_of_a_schema_is_theirs() -> None:
    """In xgrammar's reading; where they do not agree the standard's reading is always right."""
    found = list(grammar_suite.languages())
    agreed = sum(each.agreed for each in found)
    assert agreed > 3000 and sum(each.ours_agree for each in found) == agreed
    disputed = sum(each.disputed for each in found)
    right = sum((each.right for each in found), Counter())
    assert disputed > 300 and right["mini_vllm, the standard's"] == disputed
    assert right["xgrammar"] < disputed and right["llguidance"] < disputed


@pytest.mark.upstream
def test_the_keywords_refused_for_xgrammar_are_those_that_upstream_refuses() -> None:
    from vllm.v1.structured_output import backend_xgrammar as real

    assert set(FORMATS) == real.STRING_SUPPORTED_FORMATS
    refused = 0
    for case in parts.load("grammar_suite"):
        theirs = real.has_xgrammar_unsupported_json_features(case["schema"])
        assert bool(refused_by_xgrammar(case["schema"])) == theirs, case["schema"]
        refused += theirs
    typed = [{"type": "object", "properties": {"a": each}} for each in (
        {"type": "integer", "multipleOf": 2}, {"type": "array", "contains": {}},
        {"type": "string", "format": "color"}, {"type": "object", "propertyNames": {}},
        {"type": "string", "format": "date"}, {"multipleOf": 2}, {"uniqueItems": True},
    )]  # fmt: skip
    for schema in typed:
        theirs = real.has_xgrammar_unsupported_json_features(schema)
        assert bool(refused_by_xgrammar(schema)) == theirs, schema
        refused += theirs
    assert refused > 4


@pytest.mark.slow
def test_constrained_texts_of_the_shipped_model_are_the_real_engines() -> None:
    found = structured_texts.kept()
    kinds = [tuple(each) for each in found["constraints"]]
    assert len(kinds) == 50 and {kind for kind, _ in kinds} == {
        "regex",
        "choice",
        "grammar",
        "json",
    }
    answers = structured_texts.mini()
    assert structured_texts.differing(found, answers) == []
    asked = [constraint for _, constraint in structured_texts.rows()]
    judged = Counter[Any]()
    for constraint, tokens, reason in zip(asked, *answers, strict=True):
        if constraint is not None and reason == "stop":
            text = bytes(token for token in tokens if token < 256).decode()
            judged[structured_texts.is_valid(constraint, text)] += 1
    assert judged[False] == 0 and judged.total() >= 75


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True], ids=["standard", "xgrammar"])
def test_random_walks_through_the_suites_schemas_end_in_valid_json_alone(closed: bool) -> None:
    """Judged by `jsonschema`; numbers beyond its floats are left out."""
    jsonschema = pytest.importorskip("jsonschema")
    counts = Counter[str]()
    cases = [*parts.load("grammar_suite"), *parts.load("grammar_language")]
    for number, case in enumerate(cases):
        key = "json", json.dumps(case["schema"]), number % 2 == 0, closed
        try:
            machine = Machine(compile_network(grammar_of(key)))
        except GrammarError:
            continue
        judge = jsonschema.Draft202012Validator(case["schema"])
        rng = random.Random(number)
        for _ in range(15):
            text = walked(machine, rng)
            if text is None or re.search(rb"[0-9.]{15}", text):
                continue
            counts["finished"] += 1
            assert judge.is_valid(json.loads(text)), (case["schema"], text)
    assert counts["finished"] > 4000


def walked(machine: Machine, rng: random.Random) -> bytes | None:
    """A text by random bytes, closing ones often; None when it does not end in 80."""
    state, text = machine.initial, bytearray()
    while len(text) < 80 and not (state.accepting and rng.random() < 0.35):
        options = [byte for byte in range(256) if state.allowed >> byte & 1]
        if not options:
            break
        closing = [byte for byte in options if byte in b'"]},:']
        plain = [byte for byte in options if 33 <= byte < 127]
        kind = rng.random()
        byte = rng.choice(closing if closing and kind < 0.45 else plain or options)
        text.append(byte)
        state = machine.step(state, byte) or state
    return bytes(text) if state.accepting else None
