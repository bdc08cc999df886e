"""Labs 16-03 and 16-04 as parts: the same texts by the lab's detokenizer and its front door."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from course.learning import lab_contracts, mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.detokenizer import IncrementalDetokenizer, finished_text
from mini_vllm.entrypoints.async_llm import AsyncLLM
from mini_vllm.tokenizer import ByteTokenizer

PHASE = Path(__file__).parent
TEXTS = (
    b"plain", "na\u00efve \U0001f680 \u4e2d".encode(), b"\xe0A\xc3\xa9", b"\xff\xff", b"a\xf0\x9f",
    b"\xed\xa0\x80x", "end \ufffd".encode(), b"",
)  # fmt: skip


@pytest.fixture
def supplied():
    labs = [lab for lab in find_labs(PHASE.parent) if lab.id.startswith("16-")]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {
        "detokenizer": "16-03",
        "front_door": "16-04",
    }
    return parts


@pytest.mark.parametrize("given", TEXTS)
def test_pieces_of_any_bytes_join_to_the_text_that_the_engine_gives(supplied, given):
    tokens, tokenizer = [*given], ByteTokenizer()
    own = mine.engine_parts(supplied).detokenizer(tokenizer)
    pieces = [own.update(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert "".join(pieces) == own.text == finished_text(tokens, tokenizer)


def test_tokens_that_are_no_bytes_go_through_the_engines_own(supplied):
    class Words:
        vocab_size, eos_token_id = 2, None

    made = lab_contracts.detokenizer(supplied["detokenizer"])(Words())
    assert type(made) is IncrementalDetokenizer


def test_a_stream_and_stop_texts_are_found_through_the_labs_detokenizer(supplied):
    calls = mine.counted(supplied)
    params = SamplingParams(max_tokens=24, stop=("the", "\u00e9"))
    said = [
        "".join(LLM(shipped_model(), parts=mine.engine_parts(p)).stream("A block", params))
        for p in (supplied, {})
    ]
    assert said[0] == said[1] and calls["detokenizer"] >= 10


async def lives(engine):
    """Two plain clients, one with two completions and one that leaves: texts, and what stays."""
    asking = AsyncLLM(engine)
    try:
        params = SamplingParams(max_tokens=10, logprobs=1)
        plain = [await asking.open(text, params, text) for text in ("A block", "To")]
        both = await asking.open(
            "The", SamplingParams(max_tokens=6, n=2, temperature=0.8, seed=3), "both"
        )
        gone = await asking.open("Once", SamplingParams(max_tokens=400), "gone")
        asking.abort("gone")
        found = []
        for stream in (*plain, both):
            deltas = [delta async for delta in stream.deltas()]
            for index in range(2 if stream is both else 1):
                own = [delta for delta in deltas if delta.index == index]
                found.append((
                    "".join(d.text for d in own), [t for d in own for t in d.token_ids],
                    sum(len(d.logprobs) for d in own), own[-1].finish_reason,
                ))  # fmt: skip
        del gone
        return found, await asking.call(_left)
    finally:
        asking.close()


def _left(engine):
    return len(engine.requests), engine.scheduler.kv.block_pool.get_usage()


@pytest.mark.slow
def test_clients_get_the_same_through_the_labs_front_door(supplied):
    calls = mine.counted(supplied)
    said = [
        asyncio.run(lives(LLMEngine(shipped_model(), parts=mine.engine_parts(p))))
        for p in (supplied, {})
    ]
    assert said[0] == said[1]
    assert said[0][1] == (0, 0.0), "the client that left has given back its blocks"
    assert calls["front_door"] >= 3 + 10, "open, leave and every step"


@pytest.mark.slow
def test_a_server_that_ends_says_so_to_clients_of_the_labs_front_door(supplied):
    async def ended():
        engine = LLMEngine(shipped_model(), parts=mine.engine_parts(supplied))
        asking = AsyncLLM(engine)
        try:
            stream = await asking.open([65], SamplingParams(max_tokens=400), "long")
            deltas = stream.deltas()
            await anext(deltas)
            await asking.shutdown(0)
            return [delta.finish_reason async for delta in deltas], asking.stats.running
        finally:
            asking.close()

    reasons, num_running = asyncio.run(ended())
    assert (reasons[-1], num_running) == ("abort", 0)


def test_a_client_that_the_engine_refuses_is_refused_at_the_labs_door(supplied):
    async def refused():
        asking = AsyncLLM(LLMEngine(shipped_model(), parts=mine.engine_parts(supplied)))
        try:
            with pytest.raises(ValueError, match="prompt is empty"):
                await asking.open([], SamplingParams(), "empty")
        finally:
            asking.close()

    asyncio.run(refused())


@pytest.mark.slow
def test_run_and_trace_take_the_detokenizer_and_point_to_serve(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["16-03", "16-04"], monkeypatch, capsys)
    said = course.run("A", "--mine")
    assert "detokenizer        yours, from lab 16-03: 12 calls" in said
    assert "front_door         yours, not called here: course serve --mine" in said
