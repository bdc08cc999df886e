"""Structured outputs in the engine: whatever is finished keeps its constraint, and only that."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mini_vllm import LLM, EngineParts, LLMEngine, Sampler, SamplingParams
from mini_vllm.structured_output import GrammarError, StructuredOutputsParams, compiler
from mini_vllm.structured_output.expressions import Effort
from mini_vllm.structured_output.masks import unpack
from mini_vllm.structured_output.reasoning import ReasoningParser

DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["age"],
}


SPACES = json.dumps({  # after every space a tag
    "structures": [{"begin": " [", "schema": {"enum": [1, 22, 333]}, "end": "]"}],
    "triggers": [" "],
})  # fmt: skip

DRAFT_MODEL = {"method": "draft_model", "model": "models/byte-draft", "num_speculative_tokens": 2}


def asking(max_tokens: int = 32, **knobs: Any) -> SamplingParams:
    of_constraint = {key: knobs.pop(key) for key in compiler_kinds() & knobs.keys()}
    asked = StructuredOutputsParams(**of_constraint) if of_constraint else None
    return SamplingParams(max_tokens=max_tokens, structured_outputs=asked, **knobs)


def compiler_kinds() -> set[str]:
    return {"json", "regex", "choice", "grammar", "json_object", "structural_tag"}


def engine(**knobs: Any) -> LLMEngine:
    return LLMEngine("byte-llama", num_blocks=256, **knobs)


def texts(made: LLMEngine, prompts: list[str], params: Any) -> list[tuple[str, str]]:
    outputs = [result.outputs[0] for result in made.generate(prompts, params)]
    return [(output.text, str(output.finish_reason)) for output in outputs]


class Contrary(Sampler):
    """The unlikeliest token that is possible: a model that wants nothing of what it may say."""

    def sample(self, logits, params, rng=None):
        return int(np.where(np.isfinite(logits), logits, np.inf).argmin())


# ------------------------------------------------------------------ what is promised


@pytest.mark.slow
def test_every_kind_of_constraint_is_kept_beside_a_free_request():
    params = [
        asking(regex=DATE),
        asking(choice=["yes", "no"]),
        asking(64, json=PERSON),
        asking(8),
        asking(16, grammar='root ::= "<" [a-z]{1,5} ">"'),
        asking(64, json_object=True),
        asking(24, structural_tag=SPACES),
    ]
    made = engine(structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True})
    found = texts(made, ["The "] * len(params), params)
    free = texts(engine(), ["The "], asking(8))
    assert found[3] == free[0]
    assert re.fullmatch(DATE, found[0][0]) and found[1][0] in ("yes", "no")
    assert 0 <= json.loads(found[2][0])["age"] <= 150
    assert re.fullmatch("<[a-z]{1,5}>", found[4][0])
    assert [reason for _, reason in found[:3]] == ["stop"] * 3
    assert re.fullmatch(r"([^ ]| \[(1|22|333)\])+( \[?[1-3]*)?", found[6][0]) and "]" in found[6][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"async_scheduling": True},
        {
            "async_scheduling": True,
            "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 3},
        },
        {"max_num_batched_tokens": 8, "max_num_seqs": 4, "long_prefill_token_threshold": 3},
        {"enable_prefix_caching": False, "num_blocks": 12},
    ],
    ids=["drafts", "async", "async with drafts", "chunks", "preemption"],
)
def test_texts_do_not_depend_on_how_the_steps_are_cut(knobs):
    prompts = [
        "na na na na na ",
        "The date is 2024-01-01, 2024-01-",
        "[1, 1, 1, 1, ",
        "a [1] b [1]",
    ]
    params = [asking(regex="(na ){3,8}b"), asking(regex=DATE), asking(20, json={"type": "integer"})]
    params.append(asking(12, structural_tag=SPACES))
    plain = texts(engine(dtype="float64"), prompts, params)
    made = LLMEngine("byte-llama", **{"num_blocks": 256, "dtype": "float64"} | knobs)
    assert texts(made, prompts, params) == plain


def test_drafts_that_the_grammar_cannot_take_are_cut_before_they_are_planned():
    made = engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    planned: list[list[int]] = []
    made.observers.append(lambda plan: planned.extend(plan.spec_token_ids.values()))
    made.generate(["abcabcabc"], asking(12, regex="(abd)+"))
    made.generate(["ababababab"], asking(24, regex="(ab)+"))
    assert planned and all(
        bytes(drafts) in b"abdabdabd" or bytes(drafts) in b"abababab" for drafts in planned
    )


def test_forced_tokens_are_drafted_and_taken_together():
    pattern = "<answer>[0-9]</answer><end/>"
    counts = {}
    for jump_ahead in (False, True):
        made = engine(
            speculative_config={"method": "ngram", "num_speculative_tokens": 6},
            structured_outputs_config={"jump_ahead": jump_ahead},
        )
        runs = []  # without the empty plans of the time in which the grammar is compiled
        made.observers.append(lambda plan, runs=runs: runs.extend(plan.num_scheduled_tokens))
        (text, reason), *_ = texts(made, ["Say "], asking(40, regex=pattern))
        assert reason == "stop" and re.fullmatch(pattern, text)
        counts[jump_ahead] = text, len(runs)
    assert counts[True][0] == counts[False][0] and counts[True][1] < counts[False][1] / 3


@pytest.mark.slow
def test_a_contrary_model_finishes_nothing_that_is_invalid():
    made = engine(
        parts=EngineParts(sampler=Contrary),
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    asked = [
        {"regex": "yes|no|maybe"},
        {"regex": "0x[0-9a-f][0-9a-f]"},
        {"regex": DATE},
        {"choice": ["a", "ab"]},
        {"json": {"type": "boolean"}},
        {"regex": "[0-9]+x?"},
    ]
    found = texts(made, ["q"] * len(asked), [asking(12, **each) for each in asked])
    ended = [text for (text, reason), each in zip(found, asked, strict=True) if reason == "stop"]
    assert len(ended) >= 4
    for (text, reason), each in zip(found, asked, strict=True):
        if "regex" in each:
            pattern = each["regex"] if reason == "stop" else "[0-9]+"
            assert re.fullmatch(pattern, text)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_score_however_drawn_makes_a_finished_text_invalid(seed):
    check_drawn(seed, num_requests=70)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_two_thousand_drawn_texts_are_valid_where_they_end(seed):
    check_drawn(seed, num_requests=200)


def check_drawn(seed: int, num_requests: int) -> None:
    """Random scores, drawn anew for every row: what ends must be valid, by other judges."""
    rng = np.random.default_rng(seed)

    class Drawn(Sampler):
        def sample(self, logits, params, rng_of_request=None):
            scores = rng.random(len(logits))
            scores[256] *= 1.5  # ends are rare among 257
            return int(np.where(np.isfinite(logits), scores, -np.inf).argmax())

    asked: list[dict[str, Any]] = [
        {"regex": DATE},
        {"regex": "(foo|ba+r)*baz?"},
        {"regex": "[^a-z]{1,3}"},
        {"json": PERSON},
        {"json": {"type": "array", "items": {"type": ["integer", "null"]}, "maxItems": 3}},
        {"json": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]}},
        {"json": {"type": "number", "minimum": -2.5, "maximum": 7}},
        {"choice": ["a", "ab", "é"]},
    ]
    made = LLMEngine(
        "toy",
        num_blocks=4096,
        max_num_seqs=64,
        parts=EngineParts(sampler=Drawn),
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    chosen = [asked[int(i)] for i in rng.integers(len(asked), size=num_requests)]
    found = made.generate(["q"] * num_requests, [asking(24, **each) for each in chosen])
    ended = 0
    for result, each in zip(found, chosen, strict=True):
        output = result.outputs[0]
        if output.finish_reason == "stop":
            ended += 1
            assert valid(each, output.text), (each, output.text)
        else:
            assert output.finish_reason == "length"
    assert ended > num_requests / 8


def valid(asked: dict[str, Any], text: str) -> bool:
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    if "choice" in asked:
        return text in asked["choice"]
    schema, value = asked["json"], json.loads(text)
    if schema is PERSON:
        tags = value.get("tags", [])
        return 0 <= value["age"] <= 150 and len(tags) <= 2 and set(tags) <= {"a", "b"}
    if schema.get("type") == "array":
        return len(value) <= 3 and all(v is None or type(v) is int for v in value)
    if "anyOf" in schema:
        return type(value) is bool or (isinstance(value, str) and len(value) <= 2)
    return -2.5 <= value <= 7


# ------------------------------------------------------------------ waits, ends, errors


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Compilations wait until the event is set."""
    may_go, compile_network = threading.Event(), compiler.compile_network

    def held(grammar, effort):
        assert may_go.wait(20)
        effort.seconds = Effort().seconds
        return compile_network(grammar, effort)

    monkeypatch.setattr(compiler, "compile_network", held)
    return may_go


def test_a_request_waits_aside_for_its_grammar_and_others_run(monkeypatch):
    may_go = hold(monkeypatch)
    made = engine()
    made.add_request("Say ", asking(choice=["yes"]), request_id="late")
    made.add_request("Say ", asking(3), request_id="free")
    done = [r.request_id for _ in range(4) for r in made.step()]
    assert done == ["free"] and [r.request_id for r in made.scheduler.skipped] == ["late"]
    assert made.step() == []  # nothing to do is no reason to give up
    may_go.set()
    while made.has_unfinished_requests():
        done += [r.request_id for r in made.step()]
    assert done == ["free", "late"]


def test_an_abort_gives_up_a_compilation_that_nobody_waits_for(monkeypatch):
    may_go = hold(monkeypatch)
    made = engine()
    for request_id in ("a", "b"):
        made.add_request("x", asking(regex="[a-z]+"), request_id=request_id)
    live = made.feature("structured_outputs")._live
    compilation = live["a"][1]
    assert live["b"][1] is compilation
    made.abort_request("a")
    assert not compilation.effort.cancelled and compilation.waiters == 1
    made.abort_request("b")
    assert compilation.effort.cancelled and not live
    may_go.set()


@pytest.mark.slow
def test_a_compilation_that_fails_ends_its_request_alone():
    made = engine()
    huge = {"type": "string", "minLength": 59_000, "maxLength": 70_000}
    found = texts(made, ["a", "b"], [asking(json=huge), asking(choice=["fine"])])
    assert found == [("", "error"), ("fine", "stop")]


def test_equal_constraints_are_compiled_once():
    made = engine()
    made.generate(["a", "b"], asking(choice=["x", "y"]))
    made.generate(["c"], asking(choice=["x", "y"]))
    assert made.feature("structured_outputs").compiler.num_compiled == 1


@pytest.mark.slow
def test_a_refused_token_ends_with_an_error_and_counts_as_output():
    class Deaf(Sampler):
        def sample(self, logits, params, rng=None):
            return ord("z")

    made = engine(parts=EngineParts(sampler=Deaf))
    request_id = made.add_request("a", asking(regex="[a-y]+"))
    request = made.requests[request_id]
    made.step()
    while not request.is_finished:
        made.step()
    assert (request.finish_reason, request.output_token_ids) == ("error", [ord("z")])


def test_eos_ignored_at_the_end_of_a_grammar_leads_to_a_refused_token():
    request = engine().generate(["a"], asking(8, choice=["ab"], ignore_eos=True))[0].outputs[0]
    assert request.finish_reason == "error" and request.token_ids[:3] == [*b"ab", 256]


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [{"min_tokens": 5}, {"bad_words": ("b",)}, {"allowed_token_ids": (ord("a"), 256)}],
    ids=lambda knobs: next(iter(knobs)),
)
def test_wishes_that_leave_no_token_end_their_request_alone(knobs):
    made = engine()
    found = texts(made, ["x", "y"], [asking(8, choice=["ab"], **knobs), asking(8, choice=["ab"])])
    assert found[0][1] == "error" and found[1] == ("ab", "stop")


def test_stop_texts_and_caps_cut_a_constrained_text_like_any_other():
    params = [asking(30, regex="[0-9]{20}", stop=["0"]), asking(5, regex="[0-9]{20}")]
    found = texts(engine(), ["1, 2, 3, "] * 2, params)
    assert [reason for _, reason in found][1] == "length" and len(found[1][0]) == 5
    assert "0" not in found[0][0]


def test_n_completions_share_a_grammar_and_keep_their_own_places():
    made = engine()
    params = asking(16, regex="[a-z]{4,6}", n=4, temperature=1.0, seed=3)
    found = made.generate(["x"], params)[0].outputs
    assert len({output.text for output in found}) > 1
    assert all(re.fullmatch("[a-z]{4,6}", output.text) for output in found)


def test_logprobs_are_those_of_the_masked_row():
    output = engine().generate(["x"], asking(1, regex="a", logprobs=0))[0].outputs[0]
    assert output.logprobs[0][ord("a")].logprob == 0.0  # the only possibility


def test_the_batchs_masks_have_a_row_per_draft_and_one_more():
    made = engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    masks: list[tuple[list[str], np.ndarray, list[int]]] = []

    def look(plan):
        ids, rows = made.feature("structured_outputs").grammar_bitmask(plan)
        masks.append((ids, rows, [len(plan.spec_token_ids.get(r, ())) for r in ids]))

    made.observers.append(look)
    made.add_request("abababab", asking(8, regex="(ab)+"), request_id="r")
    made.add_request("free", asking(4), request_id="f")
    while made.has_unfinished_requests():
        made.step()
    with_rows = [entry for entry in masks if entry[0]]
    assert all(ids == ["r"] and len(rows) == 1 + drafts[0] for ids, rows, drafts in with_rows)
    deep = next(entry for entry in with_rows if entry[2][0] > 1)
    first, second = (set(np.flatnonzero(unpack(row, 257))) - {256} for row in deep[1][:2])
    assert {*first, *second} == {ord("a"), ord("b")} and first != second


# ------------------------------------------------------------------ the door


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "need exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice"),
        ({"choice": []}, "choice="),
        ({"choice": ["a", 1]}, "choice="),
        ({"grammar": " "}, "grammar="),
        ({"json": "{"}, "json="),
        ({"json_object": False}, "json_object=False"),
        ({"regex": 7}, "regex=7"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace=1"),
    ],
)
def test_a_bad_constraint_is_refused_where_it_is_made(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"backend": "outlines"}, "backend='outlines'"),
        ({"speed": 1}, "speed=1"),
        (3, "need a dict"),
        ({"disable_any_whitespace": True}, "need backend xgrammar or guidance"),
        ({"backend": "xgrammar", "disable_additional_properties": True}, "need backend guidance"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser='qwen3': need one of deepseek_r1, "),
        ({"reasoning_parser": "deepseek_r1"}, "in which <think> is one token"),
        ({"reasoning_parser": "seed_oss", "jump_ahead": True}, "need no reasoning_parser"),
        ({"reasoning_parser": "seed_oss", "enable_in_reasoning": 1}, "enable_in_reasoning=1"),
    ],
)
def test_a_bad_configuration_is_refused_when_the_engine_is_made(config, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        LLM("toy", structured_outputs_config=config)


def test_the_marks_of_reasoning_are_found_in_the_vocabulary_of_a_tokenizer_that_adds_a_bos():
    vocab = {"<think>": 5, "</think>": 6}
    backend = SimpleNamespace(get_vocab=lambda: vocab)
    tokenizer: Any = SimpleNamespace(_backend=backend, encode=lambda text: [0, vocab[text]])
    parser = ReasoningParser.of("deepseek_r1", tokenizer)
    assert (parser.start_token_id, parser.end_token_id) == (5, 6)
    with pytest.raises(ValueError, match="in which <seed:think> is one token"):
        ReasoningParser.of("seed_oss", tokenizer)


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "with compilation_config={"),
        ({"enable_lora": True}, "with enable_lora=True: need enable_lora left out"),
        ({"speculative_config": DRAFT_MODEL}, "method 'draft_model': need ngram or ngram_gpu"),
        ({"speculative_config": {**DRAFT_MODEL, "method": None}}, "method None: need ngram"),
    ],
)
def test_what_the_reasoning_gate_was_not_compared_with_is_refused_by_name(beside, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        engine(structured_outputs_config={"reasoning_parser": "deepseek_r1"}, **beside)


def test_a_refused_constraint_leaves_the_engine_as_it_was():
    made = engine()
    for bad in ({"regex": "(?=a)"}, {"structural_tag": "{}"}, {"json": {"$ref": "x.json"}}):
        with pytest.raises(GrammarError):
            made.add_request("a", asking(**bad))
    with pytest.raises(ValueError, match="need StructuredOutputsParams"):
        made.add_request("a", SamplingParams(structured_outputs={"regex": "a"}))
    assert not made.requests and made.generate(["a"], asking(2))[0].outputs[0].finish_reason


def test_parts_that_cannot_wait_aside_are_refused_by_name():
    class Bare:
        def __init__(self, *arguments: Any) -> None: ...

    made = engine(parts=EngineParts(request=Bare))
    with pytest.raises(ValueError, match="request part Bare: has no waits_for"):
        made.add_request("a", asking(regex="a"))


def test_what_was_prepared_beside_the_loop_is_not_parsed_at_the_door(monkeypatch):
    parsed = []
    original = compiler.grammar_of
    monkeypatch.setattr(
        compiler, "grammar_of", lambda key, *rest: parsed.append(key) or original(key, *rest)
    )
    engine = LLMEngine("byte-llama", num_blocks=64)
    params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="ab"))
    with ThreadPoolExecutor(1) as beside:
        beside.submit(engine.prepare, params).result()
    assert len(parsed) == 1
    [output] = engine.generate(["x"], params)
    assert output.outputs[0].text == "ab" and len(parsed) == 1


def test_preparing_refuses_what_the_door_would_refuse():
    engine = LLMEngine("byte-llama", num_blocks=64)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(?=a)"))
    with pytest.raises(ValueError, match="lookahead"):
        engine.prepare(params)
    engine.prepare(SamplingParams())
