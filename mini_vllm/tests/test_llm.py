"""The offline API: result objects, order, streaming, chat."""

from __future__ import annotations

import importlib.util
import json

import pytest

from mini_vllm.config import SamplingParams
from mini_vllm.llm import LLM, stream_text
from mini_vllm.models.tests.test_checkpoint import write_checkpoint
from mini_vllm.tests.support import ScriptedModel

ROCKET = "\N{ROCKET}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def llm_that_says(text: bytes, **options) -> LLM:
    """An LLM whose model continues the one-byte prompt "x" with these bytes."""
    stream = [*text, *[256] * 4]
    return LLM(ScriptedModel(lambda _, position: stream[position]), **options)


def pieces(text: bytes, max_tokens: int = 50) -> list[str]:
    return list(llm_that_says(text).stream("x", SamplingParams(max_tokens=max_tokens)))


def test_generate_returns_one_request_output_per_prompt_in_order():
    llm = LLM("toy", block_size=4)
    first, second = llm.generate(["abc", [1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (first.prompt, first.prompt_token_ids) == ("abc", [97, 98, 99])
    assert (second.prompt, second.prompt_token_ids) == (None, [1, 2])
    for output in (first, second):
        assert output.finished
        (completion,) = output.outputs
        assert (completion.index, completion.finish_reason) == (0, "length")
        assert len(completion.token_ids) == 3


def test_the_token_that_stops_a_request_is_no_part_of_its_text():
    llm, params = llm_that_says(b"on, and on"), SamplingParams(stop_token_ids=(ord(","),))
    (output,) = llm.generate("x", params)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason) == ("on", "stop")
    assert bytes(completion.token_ids) == b"on,"
    assert "".join(llm.stream("x", params)) == "on"


def test_a_single_text_needs_no_list():
    (output,) = LLM("toy").generate("abc")
    assert output.prompt == "abc"


def test_text_is_the_decoded_output_without_eos():
    (output,) = llm_that_says(b"hi").generate("x", SamplingParams(max_tokens=9))
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("hi", [104, 105, 256])
    assert completion.finish_reason == "stop"


def test_each_prompt_may_have_its_own_sampling_params():
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4)]
    outputs = LLM("toy").generate(["a", "b"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4]


def test_the_arguments_reach_the_engine():
    llm = LLM(
        "toy",
        num_blocks=9,
        block_size=2,
        max_model_len=15,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        long_prefill_token_threshold=5,
        enable_prefix_caching=False,
        scheduling_policy="priority",
    )
    scheduler = llm.llm_engine.scheduler
    assert (len(scheduler.kv.block_pool.blocks), scheduler.kv.block_size) == (9, 2)
    assert (scheduler.max_model_len, scheduler.max_num_seqs) == (15, 3)
    assert scheduler.config.max_num_batched_tokens == 7
    assert scheduler.config.long_prefill_token_threshold == 5
    assert (scheduler.kv.enable_caching, scheduler.config.policy) == (False, "priority")


# ------------------------------------------------------------------ streaming


def test_a_stream_yields_text_token_by_token_and_adds_up_to_the_whole():
    assert pieces(b"hello") == ["h", "e", "l", "l", "o"]


def test_a_character_of_several_bytes_is_held_back_until_it_is_complete():
    text = f"a{ROCKET}\N{LATIN SMALL LETTER E WITH ACUTE}b"
    assert pieces(text.encode()) == ["a", ROCKET, "\N{LATIN SMALL LETTER E WITH ACUTE}", "b"]


def test_a_character_cut_off_by_the_cap_is_dropped_as_upstream_drops_it():
    assert pieces(f"a{ROCKET}".encode(), max_tokens=3) == ["a"]


def test_invalid_bytes_appear_once_the_next_character_settles_them():
    assert "".join(pieces(b"a\xe2b")) == f"a{REPLACEMENT}b"


def test_leaving_a_stream_early_aborts_the_request_and_frees_its_blocks():
    llm = llm_that_says(b"hello")
    stream = llm.stream("x", SamplingParams(max_tokens=5))
    assert next(stream) == "h"
    assert llm.llm_engine.scheduler.kv.usage > 0.0
    stream.close()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.scheduler.kv.usage == 0.0


def test_a_stream_runs_beside_other_requests_of_its_engine():
    llm = LLM("toy", max_num_seqs=4)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = llm.generate("abc", params)[0].outputs[0].text
    llm.llm_engine.add_request("another", SamplingParams(max_tokens=3, ignore_eos=True))
    assert "".join(stream_text(llm.llm_engine, "abc", params)) == alone


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("is_async", [False, True])
def test_an_open_stream_keeps_its_text_wherever_another_call_ends_its_request(is_async, max_tokens):
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop=("never said",))
    alone = LLM("toy").generate("abc", params)[0].outputs[0].text
    llm = LLM("toy", async_scheduling=is_async)
    stream = stream_text(llm.llm_engine, "abc", params)
    begun = next(stream)
    llm.generate("x", SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert begun + "".join(stream) == alone
    assert not llm.llm_engine.has_unfinished_requests()


def test_two_open_streams_that_step_each_other_lose_nothing():
    llm = LLM("toy")
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9)]
    alone = [LLM("toy").generate("abc", params)[0].outputs[0].text for params in each]
    streams = [stream_text(llm.llm_engine, "abc", params) for params in each]
    begun = [next(stream) for stream in streams]
    assert [a + "".join(s) for a, s in zip(begun[::-1], streams[::-1], strict=True)] == alone[::-1]


# ------------------------------------------------------------------ chat


def test_chat_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        LLM("toy").chat([{"role": "user", "content": "hi"}])


@pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="jinja2 is not installed")
def test_chat_renders_the_checkpoints_template(tmp_path):
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    llm = LLM(tmp_path, num_blocks=16)
    output = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2))
    assert output.prompt == "<user>hi\n<assistant>"
