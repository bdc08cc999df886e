"""Phase 09 in the engine: edits of logits, stop texts, logprobs, n, in every way a step can go."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mini_vllm import LLM, LLMEngine, Request, SamplingParams
from mini_vllm.sample import processors
from mini_vllm.sample.logprobs import as_dicts, gather
from mini_vllm.sampler import probabilities
from mini_vllm.tokenizer import ByteTokenizer

PROMPTS = ["The KV cache", "def step(self", "Returns:\n    The", "a b c a b c a b"]


def request(prompt=(1, 2), output=(), **wishes) -> Request:
    made = Request("r", prompt, SamplingParams(max_tokens=64, **wishes))
    for token in output:
        made.append_output_token(token)
    return made


def edited(row, made: Request, eos=()) -> list[float]:
    row = np.array(row, dtype=np.float64)
    kept = row.copy()
    for processor in processors.in_order(eos):
        row = processor(made, row)
    assert row is kept or len(row) == len(kept)
    return row.round(4).tolist()


# ------------------------------------------------------------------ edits of a row


@pytest.mark.parametrize(
    ("wishes", "wanted"),
    [
        ({"presence_penalty": 0.5}, 1.5),
        ({"frequency_penalty": 0.3}, 1.4),
        ({"repetition_penalty": 1.5}, 1.3333),
        (
            {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.5},
            0.2333,  # repetition first; the additive ones first would give 0.6
        ),
    ],
)
def test_penalties_of_a_token_generated_twice(wishes, wanted):
    assert edited([2.0, 0.0, 0.0, 0.0], request(output=(0, 0), **wishes))[0] == wanted


def test_repetition_counts_the_prompt_and_makes_negative_logits_smaller():
    row = edited([2.0, -1.0, 0.0, 0.5], request((0,), (1, 1, 2), repetition_penalty=2.0))
    assert row == [1.0, -2.0, 0.0, 0.5]


def test_presence_and_frequency_count_the_output_alone():
    made = request((0, 0, 0), (1,), presence_penalty=1.0, frequency_penalty=1.0)
    assert edited([0.0, 0.0, 0.0], made) == [0.0, -2.0, 0.0]


def test_allowed_tokens_come_before_the_bias_and_stay_alone():
    made = request(allowed_token_ids=[1, 2], logit_bias={0: 100.0, 2: 1.0})
    assert edited([5.0, 4.0, 3.5, 9.0], made) == [-math.inf, 4.0, 4.5, -math.inf]


def test_a_bad_word_bans_its_last_token_after_the_others_of_the_output():
    made = request((7, 8), _bad_words_token_ids=((3,), (8, 1), (5, 6, 2)))
    inf = -math.inf
    assert edited([0.0] * 4, made) == [0.0, 0.0, 0.0, inf]  # the prompt's 8 does not count
    made.append_output_token(8)
    assert edited([0.0] * 4, made) == [0.0, inf, 0.0, inf]
    made.append_output_token(5)
    made.append_output_token(6)
    assert edited([0.0] * 4, made) == [0.0, 0.0, inf, inf]


def test_no_end_before_min_tokens():
    made = request(output=(0,), min_tokens=2, stop_token_ids=[1, 99])
    assert edited([0.0] * 4, made, eos=(3,)) == [0.0, -math.inf, 0.0, -math.inf]
    made.append_output_token(0)
    assert edited([0.0] * 4, made, eos=(3,)) == [0.0] * 4


def test_processors_leave_their_row_as_it_was():
    row = np.array([1.0, 2.0, 3.0])
    made = request(
        (0,), (1,), repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 1.0},
        allowed_token_ids=[0, 1], min_tokens=3, _bad_words_token_ids=((2,),),
    )  # fmt: skip
    for processor in processors.in_order((2,)):
        assert processor(made, row) is not row
    assert row.tolist() == [1.0, 2.0, 3.0]


def test_repetition_commutes_with_temperature_and_presence_does_not():
    """The order matters to additive edits alone; the repetition penalty only scales."""
    row = np.array([2.0, -1.0, 0.5])
    for wishes, commutes in (
        ({"repetition_penalty": 2.0}, True),
        ({"presence_penalty": 1.0}, False),
    ):
        made = request((0,), (1, 0), **wishes)
        before = processors.penalties(made, row) / 0.5
        after = processors.penalties(made, row / 0.5)
        assert np.allclose(before, after, atol=1e-12) is commutes


# ------------------------------------------------------------------ in the engine


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float64", num_blocks=512)


EDITS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"bad_words": ["the", "a"]},
    {"logit_bias": {32: -5.0, 101: 2.0}},
    {"allowed_token_ids": list(range(97, 123))},
    {"min_tokens": 20, "stop_token_ids": [32]},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "top_k": 20},
    {"stop": ["th", "e s"]},
    {"stop": "e", "include_stop_str_in_output": True, "min_tokens": 5},
]


def wishes() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=24, **edit) for edit in EDITS]


@pytest.fixture(scope="module")
def alone(llm) -> list:
    """Each wish on a prompt by itself."""
    return [llm.generate([PROMPTS[i % 4]], [w])[0].outputs[0] for i, w in enumerate(wishes())]


def prompts() -> list[str]:
    return [PROMPTS[i % 4] for i in range(len(EDITS))]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"async_scheduling": True},
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 3}, marks=pytest.mark.slow),
        pytest.param(
            {"num_blocks": 14, "block_size": 4, "max_num_seqs": 8}, marks=pytest.mark.slow
        ),
        {"num_blocks": 14, "block_size": 4, "max_num_seqs": 8, "async_scheduling": True},
    ],
    ids=["together", "async", "chunked", "preempted", "preempted-async"],
)
def test_outputs_do_not_depend_on_how_the_steps_went(alone, knobs):
    llm = LLM(dtype="float64", **({"num_blocks": 256} | knobs))
    together = [o.outputs[0] for o in llm.generate(prompts(), wishes())]
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    if "num_blocks" in knobs:
        assert (
            llm.llm_engine.scheduler.kv.block_pool.get_num_free_blocks() == knobs["num_blocks"] - 1
        )


@pytest.mark.slow
def test_greedy_outputs_with_drafts_are_those_without(llm):
    kept = [w for w in wishes() if w.logit_bias is None and w.temperature == 0.0]
    drafting = LLM(
        dtype="float64",
        num_blocks=256,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    asked = ["a b c a b c a b", *PROMPTS, "the the the the", "x = x = x ="][: len(kept)]
    for one, other in zip(llm.generate(asked, kept), drafting.generate(asked, kept), strict=True):
        assert one.outputs == other.outputs


def test_the_wishes_are_kept(alone):
    repeated, _, banned, biased, allowed, least, _, stopped, included = alone
    assert "the" not in banned.text and "a" not in banned.text
    assert biased.text.count(" ") < 3
    assert set(allowed.text) <= set("abcdefghijklmnopqrstuvwxyz")
    assert len(least.token_ids) >= 20 and b" "[0] not in least.token_ids[:20]
    assert stopped.finish_reason == "stop" and stopped.stop_reason in ("th", "e s")
    assert "th" not in stopped.text and "e s" not in stopped.text
    assert bytes(stopped.token_ids).decode() == stopped.text + stopped.stop_reason
    assert included.text.endswith("e") and len(included.text) > 5
    assert repeated.text != "" and repeated.finish_reason in ("length", "stop")


def test_of_two_stop_texts_the_first_of_the_list_wins_and_cuts(llm):
    whole = llm.generate(["The KV cache"], SamplingParams(max_tokens=12))[0].outputs[0].text
    later, sooner = whole[5:8], whole[6:8]
    for stops, at in (([later, sooner], 5), ([sooner, later], 6)):
        got = llm.generate(["The KV cache"], SamplingParams(max_tokens=12, stop=stops))[0]
        assert got.outputs[0].stop_reason == stops[0]
        assert got.outputs[0].text == whole[:at]


def test_a_stop_text_is_not_streamed_and_neither_is_what_may_become_one(llm):
    whole = llm.generate(["The KV cache"], SamplingParams(max_tokens=12))[0].outputs[0].text
    stop = whole[4:8]
    pieces = list(llm.stream("The KV cache", SamplingParams(max_tokens=12, stop=stop)))
    assert "".join(pieces) == whole[: whole.index(stop)]
    never = list(llm.stream("The KV cache", SamplingParams(max_tokens=12, stop="\x00\x00\x00")))
    assert "".join(never) == whole


@pytest.mark.parametrize("penalty", [1e-320, 1e-308])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_wishes_overflow_ends_alone(llm, penalty, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=4)
    wild = replace(params, repetition_penalty=penalty)
    with np.errstate(over="ignore"):
        first, second = llm.generate(["The", "The"], [wild, replace(params, seed=1)])
    assert first.outputs[0].finish_reason == "error"
    assert "NaN or infinite" in first.outputs[0].stop_reason
    assert second.outputs[0].finish_reason == "length"


def test_a_request_whose_wishes_leave_no_token_ends_alone(llm):
    engine = llm.llm_engine
    other = engine.add_request("The KV cache", SamplingParams(max_tokens=4))
    engine.add_request(
        "x", SamplingParams(allowed_token_ids=[65], bad_words=["A"]), request_id="no"
    )
    kept = engine.requests[other]
    [failed] = engine.step()
    assert (failed.request_id, failed.finish_reason) == ("no", "error")
    assert "leave no token" in failed.stop_reason
    assert kept.num_computed_tokens > 0, "the neighbour must not start over"
    while engine.has_unfinished_requests():
        engine.step()


# ------------------------------------------------------------------ logprobs


def test_logprobs_are_of_the_raw_logits_sampled_token_first(llm):
    plain = SamplingParams(max_tokens=6, logprobs=3)
    one = llm.generate(["The KV"], plain)[0].outputs[0]
    assert len(one.logprobs) == len(one.token_ids) == 6
    for token, entry in zip(one.token_ids, one.logprobs, strict=True):
        assert next(iter(entry)) == token and entry[token].rank == 1 and len(entry) == 3
        values = [p.logprob for p in entry.values()]
        assert values == sorted(values, reverse=True) and values[0] < 0.0
    total = sum(e[t].logprob for t, e in zip(one.token_ids, one.logprobs, strict=True))
    assert one.cumulative_logprob == pytest.approx(total, abs=1e-12)
    biased = SamplingParams(max_tokens=1, logprobs=3, logit_bias={0: 100.0})
    first = llm.generate(["The KV"], biased)[0].outputs[0]
    assert first.token_ids == [0] and first.logprobs[0][0].rank > 3 and len(first.logprobs[0]) == 4
    raw = {t: p.logprob for t, p in first.logprobs[0].items() if t}
    assert raw == {t: p.logprob for t, p in one.logprobs[0].items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_batched_tokens": 5},
        {"num_blocks": 12, "block_size": 4},
        {"async_scheduling": True, "max_num_batched_tokens": 9},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["chunked", "preempted", "async", "drafts"],
)
def test_logprobs_do_not_depend_on_how_the_steps_went(llm, knobs):
    params = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1)
    wanted = llm.generate(PROMPTS, params)
    got = LLM(dtype="float64", **({"num_blocks": 256} | knobs)).generate(PROMPTS, params)
    for one, other in zip(wanted, got, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        pairs = [*zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)]
        pairs += [*zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)]
        for a, b in pairs:
            assert list(a) == list(b)
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-9)


def test_prompt_logprobs_have_one_entry_per_token_and_none_for_the_first(llm):
    text = "The KV cache of the request"
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for _ in range(2):  # the second time the prefix is cached, and must be computed all the same
        out = llm.generate([text], params)[0]
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(text)
        assert [next(iter(e)) for e in out.prompt_logprobs[1:]] == list(text.encode())[1:]
        assert out.num_cached_tokens == 0


def test_a_rank_counts_ties_and_ids_of_equal_ones_come_in_order():
    entry = gather(np.array([1.0, 3.0, 3.0, 0.0]), 2, 2)
    assert entry.token_ids == [2, 1, 2] and entry.rank == 2
    assert list(as_dicts([entry], (), ByteTokenizer())[0]) == [2, 1]


def test_decoded_tokens_give_a_character_to_the_token_that_completes_it():
    tokens = list("aé€".encode())
    entries = [gather(np.zeros(257), token, 0) for token in tokens]
    texts = [next(iter(e.values())).decoded_token for e in as_dicts(entries, (), ByteTokenizer())]
    assert texts == ["a", "", "é", "", "", "€"]


# ------------------------------------------------------------------ n


def test_n_completions_are_n_requests_with_seeds_of_their_own(llm):
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=8)
    joined = llm.generate(["The KV cache"], params)[0]
    apart = [
        llm.generate(["The KV cache"], SamplingParams(temperature=1.0, seed=7 + i, max_tokens=8))
        for i in range(3)
    ]
    assert [o.index for o in joined.outputs] == [0, 1, 2] and joined.finished
    assert [o.token_ids for o in joined.outputs] == [a[0].outputs[0].token_ids for a in apart]


def test_n_completions_share_the_full_blocks_of_the_prompt():
    """65 tokens, blocks of 16: 4 shared ones, counted by the pool, and their sizes of the plan."""
    engine = LLMEngine(num_blocks=64)
    plans: list[list[int]] = []
    engine.observers.append(lambda plan: plans.append([*plan.num_scheduled_tokens.values()]))
    params = SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=5)
    engine.add_request("x" * 65, params, request_id="p")
    assert list(engine.requests) == ["0_p", "1_p", "2_p", "3_p"]
    engine.step()
    assert plans[0] == [65, 1, 1, 1]
    tables = [engine.scheduler.kv.get_block_ids(r)[:4] for r in engine.requests]
    assert all(list(table) == list(tables[0]) for table in tables)
    counts = [engine.scheduler.kv.block_pool.blocks[b].ref_cnt for b in tables[0]]
    assert counts == [4, 4, 4, 4]
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.scheduler.kv.block_pool.get_num_free_blocks() == 63


def test_a_parent_is_aborted_by_its_id_and_a_child_by_its_own():
    engine = LLMEngine(num_blocks=64)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=50)
    engine.add_request("abc", params, request_id="p")
    for taken in ("p", "1_p"):
        with pytest.raises(ValueError, match=f"request_id='{taken}': a live request has this id"):
            engine.add_request("abc", request_id=taken)
    engine.step()
    engine.abort_request("1_p")
    assert list(engine.requests) == ["0_p", "2_p"]
    engine.abort_request("p")
    assert not engine.requests and engine.scheduler.kv.block_pool.get_num_free_blocks() == 63
    assert engine.add_request("abc", request_id="p") == "p"


def test_min_p_comes_before_top_p():
    """p = .5 .2 .15 .1 .05: min-p .35 leaves two, of which top-p .65 keeps the first."""
    row = np.log([0.5, 0.2, 0.15, 0.1, 0.05])
    law = probabilities(row, SamplingParams(temperature=1.0, min_p=0.35, top_p=0.65))
    assert law.round(3).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
