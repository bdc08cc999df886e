"""What the explorables of the first phases show, held against the engine."""

from __future__ import annotations

import ast
import json
import random

import numpy as np
import pytest

from course.conftest import REPOSITORY
from course.site.widgets import (
    allowed_bytes,
    attention_map,
    block_allocator,
    cache_race,
    request_journey,
)
from course.truth import checking
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.attention.reference import paged_attention_reference
from mini_vllm.parts import EngineParts

# ------------------------------------------------------------------ the attention map


def test_weights_of_a_map_times_the_values_are_what_the_engines_attention_gives():
    seen = []

    def attend(query, layer_cache, batch, scale):
        out = paged_attention_reference(query, layer_cache, batch, scale)
        weights = attention_map.weights_of(query, layer_cache, batch, scale)
        length, heads, size = query.shape
        values = layer_cache[1, batch.block_tables[0]].reshape(-1, layer_cache.shape[3], size)
        values = np.repeat(values[:length], heads // values.shape[1], axis=1)
        np.testing.assert_allclose(np.einsum("hqk,khd->qhd", weights, values), out, atol=1e-10)
        seen.append(weights.shape)
        return out

    engine = LLMEngine(dtype="float64", parts=EngineParts(attention=attend))
    text = attention_map.RECORDED[0]
    engine.generate([text], SamplingParams(max_tokens=1))
    assert seen == [(4, len(text), len(text))] * 4


@pytest.mark.parametrize("text", attention_map.RECORDED)
def test_a_row_of_a_map_sums_to_one(text):
    found = attention_map.look(text)
    for layer in found["maps"]:
        for packed in layer:
            digits = [int(packed[at : at + 2], 36) for at in range(0, len(packed), 2)]
            length = len(found["bytes"])
            assert len(digits) == length * (length + 1) // 2
            for row in range(length):
                start = row * (row + 1) // 2
                assert abs(sum(digits[start : start + row + 1]) - 1000) <= row


def test_the_row_of_logits_is_that_of_an_engine_that_nobody_watches():
    engine = LLMEngine(dtype="float64")
    rows = []
    engine.row_sampler.logits_processors = [lambda request, row: rows.append(row.copy()) or row]
    engine.generate(["pages of memory"], SamplingParams(max_tokens=1))
    found = attention_map.look("pages of memory")["logits"]
    np.testing.assert_allclose(found, rows[0], atol=6e-4)


def test_a_text_looked_at_twice_is_the_same_and_leaves_the_other_as_it_was():
    first = attention_map.look("two blocks of four tokens")
    attention_map.look("two blocks of five")
    assert attention_map.look("two blocks of four tokens") == first


@pytest.mark.parametrize("text", ["", "x" * 49, "é" * 25, None, 5])
def test_a_text_of_no_or_too_many_bytes_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"text: .* need 1 to 48"):
        attention_map.look(text)


# ------------------------------------------------------------------ the race


@pytest.mark.slow
def test_both_lanes_say_the_same_and_positions_are_those_of_the_formulas():
    race = cache_race.recorded("def f(x):", 7)
    assert [token for token, _ in race["with"]] == [token for token, _ in race["without"]]
    assert [count for _, count in race["with"]] == [9] + [1] * 6
    assert [count for _, count in race["without"]] == list(range(9, 16))


@pytest.mark.slow
def test_a_race_in_the_page_is_the_recorded_one_with_seconds():
    recorded = cache_race.recorded("a b c", 3)
    cache_race.start("a b c", 3)
    for lane in cache_race.LANES:
        steps = [cache_race.advance(lane) for _ in range(3)]
        assert [[step["token"], step["positions"]] for step in steps] == recorded[lane]
        assert [step["done"] for step in steps] == [False, False, True]
        assert all(step["seconds"] > 0 for step in steps)
        with pytest.raises(ValueError, match="it has ended"):
            cache_race.advance(lane)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": ""}, "prompt: 0 bytes"), ({"prompt": "x" * 65}, "prompt: 65 bytes"),
        ({"num_tokens": 0}, "num_tokens=0"), ({"num_tokens": 49}, "num_tokens=49"),
        ({"num_tokens": 2.5}, "num_tokens=2.5"),
    ],
)  # fmt: skip
def test_a_race_that_cannot_be_is_refused_and_the_one_before_stays(given, says):
    cache_race.start("abc", 2)
    with pytest.raises(ValueError, match=says):
        cache_race.start(**{"prompt": "abc", "num_tokens": 2, **given})
    assert cache_race.advance("with")["positions"] == 3


def test_a_lane_that_is_none_is_refused():
    with pytest.raises(ValueError, match="lane='both'"):
        cache_race.advance("both")


# ------------------------------------------------------------------ the allocator


def test_what_a_later_prompt_finds_depends_on_the_order_of_freeing():
    questions = {q["ask"]: q["answer"] for q in block_allocator.document()["questions"]}
    assert list(questions.values()) == [9, 12, 8, 0]


def test_a_refused_move_changes_nothing_but_what_was_said():
    story = block_allocator.Story("tail", 4, 4)
    story.move(("add", "A", "abcdefgh"))
    before = story.state()
    story.move(("add", "B", "too long for one"))
    after = story.state()
    assert after["last"]["refused"]
    assert {**after, "last": None} == {**before, "last": None}


def random_story(seed):
    """A story of up to 40 moves over few letters, so that prefixes meet; and its pool's sizes."""
    draw = random.Random(seed)
    num_blocks, block_size = draw.randint(3, 12), draw.choice((1, 2, 4))
    order = draw.choice(list(block_allocator.ORDERS))
    story = block_allocator.Story(order, num_blocks, block_size)
    ops = []
    for number in range(draw.randint(5, 40)):
        live = sorted(story.live)
        kind = draw.choice(("add", "add", "grow", "grow", "grow", "end") if live else ("add",))
        if kind == "add":
            length = draw.randint(1, 3 * block_size + 2)
            op = (kind, f"r{number}", "".join(draw.choices("ab", (5, 1), k=length)))
        elif kind == "grow":
            op = (kind, draw.choice(live), draw.choice("aab"))
        else:
            op = (kind, draw.choice(live))
        ops.append(op)
        story.move(op)
    return {
        "ops": [list(op) for op in ops], "order": order, "num_blocks": num_blocks,
        "block_size": block_size,
    }  # fmt: skip


def test_random_stories_meet_hits_evictions_shared_blocks_and_refusals():
    met = set()
    for seed in range(60):
        given = random_story(seed)
        story = block_allocator.Story(given["order"], given["num_blocks"], given["block_size"])
        for op in given["ops"]:
            story.move(op)
            last = story.last
            met |= {name for name in ("hits", "evicted", "refused") if last[name]}
            met |= {"shared"} if max(story.state()["refs"]) > 1 else set()
    assert met == {"hits", "evicted", "refused", "shared"}


# ------------------------------------------------------------------ the journey


@pytest.mark.slow
def test_every_hop_of_the_way_is_met_and_cites_a_line_that_is_there():
    hops = request_journey.HOPS
    assert list(dict.fromkeys(stop["hop"] for stop in request_journey.stops())) == list(hops)
    tree = REPOSITORY / "upstream"
    if not tree.is_dir():
        pytest.skip("needs the pinned tree: course upstream fetch")
    wrong = {
        name: checking.problem_of(request_journey.cited(hop), tree) for name, hop in hops.items()
    }
    assert not any(wrong.values()), wrong


def test_what_the_request_brings_back_is_what_the_engine_generates():
    engine = LLMEngine(dtype="float64")
    [result] = engine.generate([request_journey.PROMPT], request_journey.PARAMS)
    told = [stop for stop in request_journey.stops() if stop["hop"] == "output"]
    assert told[-1]["fields"]["text"] == repr(result.outputs[0].text)
    assert told[-1]["fields"]["finish_reason"] == repr(result.outputs[0].finish_reason)
    sent = [
        stop["fields"]["new_token_ids"] for stop in request_journey.stops() if stop["hop"] == "news"
    ]
    assert sent == [f"[{token}]" for token in result.outputs[0].token_ids]


def test_slots_of_the_journey_are_those_of_its_blocks():
    for stop in request_journey.stops():
        if stop["hop"] == "schedule":
            table = ast.literal_eval(stop["fields"]["block_ids"])["A"]
        elif stop["hop"] == "execute":
            size = request_journey.BLOCK_SIZE
            positions, slots = (
                ast.literal_eval(stop["fields"][n]) for n in ("positions", "slot_mapping")
            )
            assert slots == [table[p // size] * size + p % size for p in positions]


def test_the_questions_about_the_journey_have_the_answers_of_the_formulas():
    answers = [question["answer"] for question in request_journey.questions()]
    prompt, chunk, outputs = 12, 8, 3
    assert answers == [-(-prompt // chunk) + outputs - 1, 0, outputs, prompt + outputs - 1]


# ------------------------------------------------------------------ a constraint of one's own


@pytest.mark.slow
def test_a_typed_constraint_gives_the_film_of_the_document():
    prompt, constraint, _ = allowed_bytes.CASES["regex, a date"]
    film = allowed_bytes.typed("regex", constraint["regex"], prompt)
    recorded = allowed_bytes.written("regex, a date")
    assert {name: film[name] for name in recorded} == recorded
    film = allowed_bytes.typed("choice", "yes\nno\n\nmaybe", "Is it full? ")
    assert film["tokens"] == allowed_bytes.written("choice, yes, no or maybe")["tokens"]


def test_a_typed_schema_is_read_as_json():
    film = allowed_bytes.typed("json", '{"enum": ["gpu", "cpu"]}', "Where: ")
    text = bytes(token for token in film["tokens"] if token < 256)
    assert json.loads(text) in ("gpu", "cpu")
    assert film["reason"] == "stop"


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(cat", r"a '\(' without '\)' at position 4"),
        ("regex", "a(?=b)", "lookahead at position 3"),
        ("choice", "\n", "need texts, at least one"),
        ("json", "{", "json: the text is not JSON: .* line 1 column 2"),
        ("json", '{"type": "strin"}', "type='strin': need one of"),
        ("json", "[]", "need a JSON Schema"),
        ("regex", "", "text: 0 characters"),
        ("regex", "x" * 601, "text: 601 characters"),
        ("yaml", "a: 1", "kind='yaml'"),
    ],
)
def test_a_wrong_constraint_is_refused_in_the_engines_own_words(kind, text, says):
    with pytest.raises(ValueError, match=says):
        allowed_bytes.typed(kind, text, "Say: ")
