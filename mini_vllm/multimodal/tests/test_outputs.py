"""What a prompt with pictures is answered with depends on nothing but the prompt."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.tests.multimodal_support import picture, prompt

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
PICTURES = [picture(seed) for seed in range(5)]


@pytest.fixture(scope="module")
def alone(folder):
    """The answer to a prompt in an engine of its own, in one chunk and without a cache."""
    engine = LLMEngine(folder, dtype="float64", enable_prefix_caching=False)
    answers: dict[str, list[int]] = {}

    def answer(made, max_tokens):
        key = repr((made["prompt"], max_tokens)) + "".join(
            p.tobytes().hex() for p in made.get("multi_modal_data", {}).get("image", ())
        )
        if key not in answers:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            answers[key] = engine.generate([made], params)[0].outputs[0].token_ids
        return answers[key]

    return answer


def test_a_picture_changes_the_answer(alone):
    answers = {tuple(alone(prompt("what ", p, " is it"), 4)) for p in PICTURES}
    assert len(answers) > 1
    assert tuple(alone(prompt("what  is it"), 4)) not in answers


def test_a_text_is_answered_as_by_the_language_model_alone(folder):
    from mini_vllm.models.loader import load_checkpoint
    from mini_vllm.models.transformer import Transformer

    checkpoint = load_checkpoint(folder)
    bare = LLMEngine(
        Transformer(checkpoint.config, checkpoint.weights, "float64"),
        tokenizer=checkpoint.tokenizer,
    )
    seeing = LLMEngine(folder, dtype="float64")
    texts = ["what is it", "nothing to see here"]
    got = [[o.outputs[0].token_ids for o in e.generate(texts, PARAMS)] for e in (bare, seeing)]
    assert got[0] == got[1]
    assert seeing.model.is_multimodal is None
    assert seeing.feature("multimodal").stats()["encoder_runs"] == 0


def workload(seed, folder, alone):
    """A random engine under random prompts; (what it answers, what each is answered alone)."""
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4, 8))
    is_async, policy = rng.random() < 0.4, rng.choice(("fcfs", "priority"))
    whole = rng.random() < 0.2
    largest = 4
    engine = LLMEngine(
        folder, dtype="float64", block_size=size, num_blocks=2 + rng.choice((40, 60, 100)) // size,
        enable_prefix_caching=rng.random() < 0.8, async_scheduling=is_async, policy=policy,
        max_num_batched_tokens=rng.choice((4, 5, 7, 16, 64)), max_num_seqs=rng.choice((2, 4)),
        max_num_encoder_input_tokens=largest + rng.choice((0, 0, 3, 8)),
        encoder_cache_size=largest + rng.choice((0, 0, 4, 20)), disable_chunked_mm_input=whole,
        forget_withdrawn_blocks=True,
    )  # fmt: skip
    prompts = []
    for _ in range(rng.randint(3, 7)):
        parts = ["what is"[: rng.randint(0, 7)]]
        for _ in range(rng.randint(0, 3)):
            parts += [rng.choice(PICTURES), " and so"[: rng.randint(0, 7)]]
        parts.append("?")
        prompts.append((prompt(*parts), rng.randint(1, 6)))
    requests, preempted = [], 0
    engine.observers.append(lambda plan: seen.append(len(plan.preempted_req_ids)))
    seen: list[int] = []
    waiting = list(prompts)
    while waiting or engine.has_unfinished_requests():
        if waiting and rng.random() < 0.6:
            made, count = waiting.pop(0)
            params = SamplingParams(max_tokens=count, ignore_eos=True)
            known = engine.add_request(made, params, priority=rng.randint(0, 2))
            requests.append(engine.requests[known])
        if engine.has_unfinished_requests():
            engine.step()
    preempted = sum(seen)
    answers = [request.output_token_ids for request in requests]
    cache = engine.feature("multimodal").gate.cache
    assert all(not holders for holders in cache.cached.values())  # who is gone references nothing
    assert cache.num_freeable_slots == cache.cache_size
    assert set(engine.feature("multimodal").runner.encoder_cache) <= {*cache.cached, *cache.freed}
    return answers, [alone(made, count) for made, count in prompts], preempted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_answers_depend_on_no_chunk_no_budget_no_preemption_and_no_hit(seed, folder, alone):
    got, expected, _ = workload(seed, folder, alone)
    assert got == expected


@pytest.mark.slow
def test_three_hundred_workloads_are_answered_as_alone(folder, alone):
    preempted = 0
    for seed in range(100, 400):
        got, expected, victims = workload(seed, folder, alone)
        assert got == expected, seed
        preempted += bool(victims)
    assert preempted > 30


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7])
def test_a_chunk_may_end_anywhere_inside_a_picture(budget, folder, alone):
    engine = LLMEngine(
        folder, dtype="float64", max_num_batched_tokens=budget, max_num_seqs=1,
        max_num_encoder_input_tokens=4, encoder_cache_size=4,
    )  # fmt: skip
    made = prompt("see", PICTURES[0], "and", PICTURES[1], "?")
    plans: list[int] = []
    engine.observers.append(lambda plan: plans.extend(plan.num_scheduled_tokens.values()))
    assert engine.generate([made], PARAMS)[0].outputs[0].token_ids == alone(made, 4)
    assert engine.feature("multimodal").stats()["encoder_runs"] == 2
    assert max(plans) <= budget


def test_a_picture_is_encoded_once_for_several_prompts(folder):
    engine = LLMEngine(folder, enable_prefix_caching=False)
    made = [prompt("one ", PICTURES[0]), prompt("another ", PICTURES[0].copy(), "!")]
    engine.generate(made, PARAMS)
    assert engine.feature("multimodal").stats()["encoder_runs"] == 1


def test_equal_text_under_another_picture_shares_no_block(folder):
    engine = LLMEngine(folder, block_size=4)
    hits: list[int] = []
    engine.observers.append(lambda plan: hits.extend(plan.num_cached_tokens.values()))
    for which in (0, 1, 0):
        engine.generate([prompt("abcd", PICTURES[which], "what is it")], PARAMS)
    assert hits == [0, 4, 16]  # the text in front is shared, the picture's block is not


def test_a_picture_that_is_shifted_shares_no_block_with_itself(folder):
    engine = LLMEngine(folder, block_size=2)
    hits: list[int] = []
    engine.observers.append(lambda plan: hits.extend(plan.num_cached_tokens.values()))
    marker = [257]
    for ids, data in (
        ([*marker, 5, 5, 5], [PICTURES[0]]),
        ([*marker, *marker, 5], [PICTURES[0]] * 2),
    ):
        engine.generate([{"prompt_token_ids": ids, "multi_modal_data": {"image": data}}], PARAMS)
    assert hits == [0, 4]  # four placeholders of the same picture at the same place
    shifted = LLMEngine(folder, block_size=4)
    keys = []
    for text in ("a", "ab"):
        _, [request] = shifted.inputs.process(prompt(text, PICTURES[0], "tail"))
        keys.append(request.block_keys(4, 8))
    assert keys[0] != keys[1]


def test_bytes_of_another_shape_are_another_picture(folder):
    wide, high = np.zeros((28, 14, 3), np.uint8), np.zeros((14, 28, 3), np.uint8)
    assert wide.tobytes() == high.tobytes()
    engine = LLMEngine(folder)
    ids = [engine.inputs.process(prompt(p))[1][0].block_keys.mm_features[0] for p in (wide, high)]
    assert ids[0].identifier != ids[1].identifier


def test_n_completions_of_a_prompt_see_its_picture(folder):
    engine = LLMEngine(folder, dtype="float64", seed=3)
    params = [SamplingParams(n=n, temperature=1.0, max_tokens=4, seed=5) for n in (1, 2)]
    one, two = engine.generate([prompt("see", PICTURES[2])] * 2, params)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert len(two.outputs) == 2
    assert engine.feature("multimodal").stats()["encoder_runs"] == 1


def test_a_reset_of_the_prefix_cache_loses_no_picture(folder, alone):
    engine = LLMEngine(folder, dtype="float64")
    made = prompt("see", PICTURES[3], " it")
    known = engine.add_request(made, SamplingParams(max_tokens=6, ignore_eos=True))
    request = engine.requests[known]
    engine.step()
    engine.reset_prefix_cache(reset_running_requests=True)
    while not request.is_finished:
        engine.step()
    assert request.output_token_ids == alone(made, 6)


def test_a_step_that_fails_leaves_every_picture_to_be_encoded_again(folder, alone, monkeypatch):
    engine = LLMEngine(folder, dtype="float64")
    made = prompt("see", PICTURES[4], " it")
    request = engine.requests[engine.add_request(made, PARAMS)]
    forward = engine.model.transformer.forward
    monkeypatch.setattr(engine.model.transformer, "forward", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(engine.model.transformer, "forward", forward)
    assert engine.feature("multimodal").stats()["cached"] == 0
    while not request.is_finished:
        engine.step()
    assert request.output_token_ids == alone(made, 4)


def test_a_prompt_comes_as_upstream_takes_it(folder):
    llm = LLM(folder)
    [one] = llm.generate(prompt("see", PICTURES[0]), PARAMS)
    single = {"prompt": "see<image>", "multi_modal_data": {"image": PICTURES[0]}}
    ids = {"prompt_token_ids": [*b"see", 257], "multi_modal_data": {"image": [PICTURES[0]]}}
    for other in llm.generate([single, ids], PARAMS):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
    assert one.prompt == "see<image>" and len(one.prompt_token_ids) == 7
