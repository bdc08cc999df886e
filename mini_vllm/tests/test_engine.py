"""The engine's loop: invariants E2-E6, the loop's edges, and what a request may count on.

E1 needs a model that reads the KV cache: `test_shipped_model.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine, Sampler, SamplingParams
from mini_vllm.models.toy import ToyModel
from mini_vllm.request import RequestStatus
from mini_vllm.tests.support import (
    Moment,
    Scenario,
    ScenarioRequest,
    ScriptedModel,
    TinyTokenizer,
    drive,
    for_all,
    for_scenarios,
)

EOS = 256


def toy_engine(**options) -> LLMEngine:
    return LLMEngine(**{"model": "toy", "num_blocks": 64, "block_size": 4} | options)


def outputs(engine: LLMEngine, prompts, params: SamplingParams) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in engine.generate(prompts, params)]


def engine_that_says(stream: list[int], prompt_length: int, **options) -> LLMEngine:
    """An engine whose model emits `stream` after any prompt of `prompt_length` tokens."""
    model = ScriptedModel(lambda _, position: stream[position + 1 - prompt_length])
    return toy_engine(model=model, **options)


# ------------------------------------------------------------------ invariants


def sampling_params(st):
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 5]),
        top_p=st.sampled_from([0.3, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 5),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
    )


@pytest.mark.slow
@for_all(
    lambda st: st.lists(
        st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=12), sampling_params(st)),
        min_size=1,
        max_size=5,
    ),
    lambda st: st.integers(1, 3),
    max_examples=60,
)
def test_e2_the_same_seed_gives_the_same_tokens_in_another_engine_and_another_batch(
    requests, budget
):
    prompts, params = [p for p, _ in requests], [s for _, s in requests]
    together = LLMEngine(num_blocks=64, block_size=4, model=ToyModel(8), tokenizer=TinyTokenizer())
    squeezed = LLMEngine(
        num_blocks=64,
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=budget,
        model=ToyModel(8),
        tokenizer=TinyTokenizer(),
    )
    first = [r.outputs[0].token_ids for r in together.generate(prompts, params)]
    second = [r.outputs[0].token_ids for r in squeezed.generate(prompts, params)]
    assert first == second


@pytest.mark.slow
@for_scenarios(60, caching=(True,))
def test_e3_the_engine_touches_nothing_of_a_model_but_forward(scenario: Scenario):
    class Tripwire:
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str):
            assert name in ("forward", "__class__"), f"the engine read model.{name}"
            return inner.forward

    inner = ToyModel(TinyTokenizer.vocab_size)
    plain = scenario.engine()
    engine = scenario.engine()
    engine.model = Tripwire()
    expected = {k: r.output_token_ids for k, r in drive(scenario, None, plain).items()}
    assert {k: r.output_token_ids for k, r in drive(scenario, None, engine).items()} == expected


@pytest.mark.slow
@for_all(lambda st: st.integers(1, 60), lambda st: st.integers(1, 7), lambda st: st.integers(0, 5))
def test_e4_a_prompt_longer_than_the_budget_is_computed_without_samples(length, budget, threshold):
    engine = toy_engine(
        max_num_seqs=1, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold
    )
    request_id = engine.add_request([1] * length, SamplingParams(max_tokens=1))
    request = engine.requests[request_id]
    chunk = min(threshold or budget, budget)
    for step in range(1, -(-length // chunk) + 1):
        engine.step()
        assert request.num_computed_tokens == min(step * chunk, length)
        assert request.num_output_tokens == (step * chunk >= length)
    assert request.is_finished


@pytest.mark.slow
@for_all(
    lambda st: st.lists(st.sampled_from([1, 2, 3, EOS]), min_size=12, max_size=12),
    lambda st: st.integers(1, 12),
    lambda st: st.booleans(),
    lambda st: st.sampled_from([(), (3,)]),
    lambda st: st.integers(0, 4),
    max_examples=150,
)
def test_e5_output_ends_at_the_first_stop_or_exactly_at_the_cap(
    stream, max_tokens, ignore_eos, stop_token_ids, min_tokens
):
    min_tokens = min(min_tokens, max_tokens)
    stops = set(stop_token_ids) | (set() if ignore_eos else {EOS})
    # min_tokens masks stop ids, so the script must not ask for them that early.
    stream = [1 if i < min_tokens and t in {EOS, 3} else t for i, t in enumerate(stream)]
    first_stop = next((i for i, token in enumerate(stream) if token in stops), 99)
    expected = stream[: min(first_stop + 1, max_tokens)]
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
    )
    (result,) = engine_that_says(stream, 3).generate(["abc"], params)
    assert result.outputs[0].token_ids == expected
    assert result.outputs[0].finish_reason == ("stop" if expected[-1] in stops else "length")


@pytest.mark.slow
@for_scenarios(40)
def test_e6_greedy_requests_draw_no_randomness(scenario: Scenario):
    class NoRandomness(Sampler):
        def sample(self, logits, params, rng=None):
            assert rng is None, "a greedy request was given a generator"
            return super().sample(logits, params, rng)

    engine = scenario.engine(parts=EngineParts(sampler=NoRandomness))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", _forbidden)
        drive(scenario, None, engine)
    assert engine.row_sampler.generators == {}


def _forbidden(*_):
    raise AssertionError("a greedy workload made a random generator")


@pytest.mark.slow
@for_all(lambda st: st.integers(1, 40), lambda st: st.integers(1, 6), max_examples=40)
def test_e6_a_sampled_request_draws_once_per_output_and_never_during_prefill(length, max_tokens):
    class Counting(np.random.Generator):
        draws = 0

        def choice(self, *args, **kwargs):
            Counting.draws += 1
            return super().choice(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: Counting(np.random.PCG64(seed)))
        engine = toy_engine(max_num_batched_tokens=4, max_num_seqs=1)
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, ignore_eos=True)
        request = engine.requests[engine.add_request([1] * length, params)]
        while not request.is_finished:
            engine.step()
            assert Counting.draws == request.num_output_tokens
    assert Counting.draws == max_tokens


# ------------------------------------------------------------------ named by the contract


@pytest.mark.parametrize("threshold", [0, 3])
def test_chunked_prefill_matches_unchunked_output(threshold):
    """On the toy model; `test_shipped_model.py` says the same where K and V matter."""
    prompts = ["a longer prompt than the budget", "short"]
    params = SamplingParams(max_tokens=6)
    chunked = toy_engine(
        max_num_seqs=4, max_num_batched_tokens=5, long_prefill_token_threshold=threshold
    )
    assert outputs(chunked, prompts, params) == outputs(toy_engine(), prompts, params)


def test_prefix_caching_matches_no_caching_output():
    prompts = ["the same beginning, one", "the same beginning, two", "the same beginning, one"]
    params = SamplingParams(max_tokens=6)
    cached, uncached = toy_engine(), toy_engine(enable_prefix_caching=False)
    assert outputs(cached, prompts, params) == outputs(uncached, prompts, params)
    assert outputs(cached, prompts, params) == outputs(uncached, prompts, params)


# ------------------------------------------------------------------ the loop


def test_results_come_in_prompt_order_whatever_finishes_first():
    engine = toy_engine()
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    results = engine.generate(["a", "b", "c"], params)
    assert [r.prompt for r in results] == ["a", "b", "c"]
    assert [len(r.outputs[0].token_ids) for r in results] == [9, 1, 5]


def test_step_returns_the_requests_that_finished_in_it():
    engine = toy_engine()
    first = engine.add_request("a", SamplingParams(max_tokens=1))
    engine.add_request("b", SamplingParams(max_tokens=2, ignore_eos=True))
    assert [r.request_id for r in engine.step()] == [first]


def test_stepping_an_idle_engine_returns_nothing():
    assert toy_engine().step() == []


def test_request_ids_are_unique_across_engines():
    one, two = toy_engine(), toy_engine()
    ids = {one.add_request("a"), two.add_request("a"), one.add_request("a")}
    assert len(ids) == 3
    assert all(request_id.startswith("req-") for request_id in ids)


def test_a_prompt_may_be_text_or_token_ids():
    engine = toy_engine()
    by_text, by_ids = engine.generate(["abc", [97, 98, 99]])
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert (by_text.prompt, by_ids.prompt) == ("abc", None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == [97, 98, 99]


def test_generate_of_no_prompts_is_empty():
    assert toy_engine().generate([]) == []


def test_the_model_may_be_replaced_between_steps():
    engine = engine_that_says([1] * 9, 1)
    request_id = engine.add_request("x", SamplingParams(max_tokens=4, ignore_eos=True))
    request = engine.requests[request_id]
    engine.step()
    engine.model = ScriptedModel(lambda *_: 5)
    while not request.is_finished:
        engine.step()
    assert request.output_token_ids == [1, 5, 5, 5]


def test_an_aborted_request_frees_its_blocks_and_the_others_go_on():
    engine = toy_engine()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    first, second = engine.add_request("abcdef", params), engine.add_request("uvwxyz", params)
    engine.step()
    request = engine.requests[first]
    engine.abort_request(first)
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED_ABORTED, "abort")
    survivor = engine.requests[second]
    while engine.has_unfinished_requests():
        engine.step()
    assert survivor.num_output_tokens == 5
    assert engine.scheduler.kv.usage == 0.0


def test_aborting_an_unknown_id_is_a_no_op():
    engine = toy_engine()
    engine.abort_request("nobody")
    assert not engine.has_unfinished_requests()


def test_min_tokens_holds_back_eos_and_stop_ids():
    """The script prefers EOS; masked, the next best id of a one-hot row is id 0."""
    engine = engine_that_says([EOS] * 9, 1)
    params = SamplingParams(max_tokens=6, min_tokens=3)
    (result,) = engine.generate(["x"], params)
    assert result.outputs[0].token_ids == [0, 0, 0, EOS]


def test_the_length_cap_of_the_model_ends_a_request():
    engine = toy_engine(max_model_len=10)
    (result,) = engine.generate(["abcdef"], SamplingParams(max_tokens=50, ignore_eos=True))
    assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (4, "length")


def test_several_eos_ids_of_a_checkpoint_all_end_a_request():
    engine = engine_that_says([1, 2, 9, 4], 1)
    engine.inputs.eos_token_ids = (EOS, 9)
    (result,) = engine.generate(["x"], SamplingParams(max_tokens=4))
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([1, 2, 9], "stop")


def test_more_urgent_requests_run_first_under_the_priority_policy():
    engine = toy_engine(policy="priority", max_num_seqs=1)
    params = SamplingParams(max_tokens=1)
    ids = [engine.add_request("x", params, priority=p) for p in (2, 0, 1)]
    order = [engine.step()[0].request_id for _ in range(3)]
    assert order == [ids[1], ids[2], ids[0]]


def test_unseeded_sampled_requests_of_one_prompt_differ_from_each_other():
    """Each request draws from its own stream; equal streams would make samples copies."""
    engine = toy_engine(seed=3)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    results = outputs(engine, ["x"] * 3, params)
    assert len({tuple(tokens) for tokens in results}) == 3


def test_unseeded_sampling_repeats_in_another_engine_of_the_same_seed():
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second, other = (
        outputs(toy_engine(seed=seed), ["x", "y"], params) for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


def test_a_part_given_to_the_engine_is_the_one_it_uses():
    class AlwaysSeven(Sampler):
        def sample(self, logits, params, rng=None):
            return 7

    engine = toy_engine(parts=EngineParts(sampler=AlwaysSeven))
    assert outputs(engine, ["x"], SamplingParams(max_tokens=2)) == [[7, 7]]


def test_the_scenarios_of_these_tests_reach_every_event():
    """Guards the workload itself: one small scenario with a hit, a preemption and a resume."""
    seen: set[str] = set()

    def check(moment: Moment) -> None:
        output = moment.output
        seen.update(
            name
            for name, happened in {
                "hit": any(output.num_cached_tokens.values()),
                "preempted": output.preempted_req_ids,
                "resumed": output.scheduled_resumed_req_ids,
                "finished": moment.finished,
            }.items()
            if happened
        )

    prompt = (1, 2, 3, 4, 5, 6)
    arrivals = tuple(ScenarioRequest(i, prompt, 12, ignore_eos=True) for i in range(3))
    drive(Scenario(arrivals, block_size=2, spare_blocks=4, spare_budget=40), check)
    assert seen == {"hit", "preempted", "resumed", "finished"}


def test_without_features_there_is_no_gate_no_mask_and_nothing_in_flight():
    engine = LLMEngine("toy")
    engine.generate(["a"], SamplingParams(max_tokens=2))
    assert engine.scheduler.gates == () and engine.row_sampler.masks == []
    assert [f.name for f in engine.features if f.name] == [] and not engine.executor.batch_queue
