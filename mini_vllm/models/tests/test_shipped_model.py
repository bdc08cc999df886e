"""E1 on the shipped model: scheduling, caching and preemption never change a request's output.

The model reads K and V only through block tables, so a wrong slot or a stale block changes its
logits. All in float64: there a product's rounding (about 1e-16) cannot reach the gap between the
two likeliest tokens, whatever the batch's shape; in float32 it can.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

from mini_vllm.attention import paged_attention_reference
from mini_vllm.batch import ForwardBatch
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Transformer
from mini_vllm.tests.support import Moment, Scenario, ScenarioRequest, drive, for_all, scenarios
from mini_vllm.tokenizer import ByteTokenizer

MAX_TOKENS = 7
TEXTS = (
    b"The KV cache is divided into blocks",
    b"The KV cache is shared between requests",
    b"def schedule(self) -> SchedulerOutput:",
)
TOLERANCE = 1e-10
"""On logits of about 10: 1e5 times the rounding of float64, and far below any real difference."""


@functools.cache
def model() -> Transformer:
    """The shipped model in float64, loaded once for all engines of this file."""
    checkpoint = load_checkpoint("byte-llama")
    return Transformer(checkpoint.config, checkpoint.weights, "float64")


@functools.cache
def expected(prompt: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits of each, by one dense pass over the whole sequence.

    The tokens come from a roomy engine without caching; then one forward pass over prompt and
    outputs, in one piece, by the reference attention, must choose the same ones.

    Returns:
        `(token_ids, logits)`: MAX_TOKENS ids and [MAX_TOKENS, vocab_size].
    """
    engine = LLMEngine(num_blocks=64, block_size=16, enable_prefix_caching=False, model=model())
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    (result,) = engine.generate([prompt], params)
    tokens = [*prompt, *result.outputs[0].token_ids[:-1]]
    logits = dense_logits(tokens)[len(prompt) - 1 :]
    assert logits.argmax(axis=1).tolist() == result.outputs[0].token_ids
    return result.outputs[0].token_ids, logits


def dense_logits(tokens: list[int]) -> np.ndarray:
    """Logits [num_tokens, vocab_size] of every position, from one pass over one big block."""
    length = len(tokens)
    reference = copy.copy(model())
    reference.attention = paged_attention_reference
    num_layers, num_kv_heads, head_dim = reference.kv_shape
    return reference.forward(
        ForwardBatch(
            token_ids=np.array(tokens),
            positions=np.arange(length),
            slot_mapping=np.arange(length),
            query_start_loc=np.array([0, length]),
            seq_lens=np.array([length]),
            block_tables=np.zeros((1, 1), dtype=np.int64),
            logits_indices=np.arange(length),
            block_size=length,
            kv_cache=np.zeros((num_layers, 2, 1, length, num_kv_heads, head_dim)),
        )
    )


class Recorder:
    """A model that remembers the logits it returned last."""

    def __init__(self, inner: Transformer) -> None:
        self.inner = inner
        self.logits = np.empty((0, 0))

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        self.logits = self.inner.forward(batch)
        return self.logits


def prompts(st):
    """Starts of three texts, two with a common beginning, some with another last byte."""
    return st.builds(
        lambda text, length, tail: tuple(text[:length]) + tail,
        st.sampled_from(TEXTS),
        st.sampled_from([20, 18, 9, 8, 5, 3, 1]),
        st.sampled_from([(), (), (33,)]),
    )


def workloads(st):
    return scenarios(st, prompts=prompts(st), max_tokens=MAX_TOKENS, max_requests=4, spare_blocks=3)


def check_e1(scenario: Scenario, engine: LLMEngine | None = None) -> dict[str, int]:
    """Drive a scenario on the shipped model; every logits row and every output must be as alone.

    Returns:
        How often each event happened.
    """
    engine = engine or scenario.engine(model(), ByteTokenizer())
    recorder = engine.model = Recorder(engine.model)
    events = {"hits": 0, "preempted": 0, "resumed": 0, "chunks": 0, "sampled": 0}

    def check(moment: Moment) -> None:
        output = moment.output
        if moment.phase == "scheduled" or not output.scheduled_requests:
            return
        events["hits"] += sum(hits > 0 for hits in output.num_cached_tokens.values())
        events["preempted"] += len(output.preempted_req_ids)
        events["resumed"] += len(output.scheduled_resumed_req_ids)
        for request, row in zip(output.scheduled_requests, recorder.logits, strict=True):
            index = moment.before[request.request_id].num_tokens - request.num_prompt_tokens
            if request.num_output_tokens == index:
                events["chunks"] += 1
                continue
            events["sampled"] += 1
            tokens, logits = expected(tuple(request.prompt_token_ids))
            worst = float(np.abs(row - logits[index]).max())
            assert worst < TOLERANCE, f"logits of output {index} of {request} are off by {worst}"
            assert request.all_token_ids[-1] == tokens[index]

    for request in drive(scenario, check, engine).values():
        tokens, _ = expected(tuple(request.prompt_token_ids))
        assert request.output_token_ids == tokens[: request.num_output_tokens]
    return events


@pytest.mark.slow
@for_all(workloads, max_examples=20, shrink=False)
def test_e1_output_does_not_depend_on_budget_threshold_pool_caching_mates_or_preemption(
    scenario: Scenario,
):
    check_e1(scenario)


@pytest.mark.slow
@for_all(workloads, max_examples=200, shrink=False)
def test_e1_on_many_more_workloads(scenario: Scenario):
    check_e1(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("enable_caching", [True, False])
def test_e1_one_workload_with_chunks_hits_and_preemptions_at_once(policy, enable_caching):
    text = tuple(TEXTS[0][:12])
    arrivals = (
        ScenarioRequest(0, text, MAX_TOKENS, priority=2, ignore_eos=True),
        ScenarioRequest(0, (*text, 33), MAX_TOKENS, priority=1, ignore_eos=True),
        ScenarioRequest(2, text[:9], MAX_TOKENS, priority=0, ignore_eos=True),
    )
    scenario = Scenario(arrivals, 2, 6 if enable_caching else 10, 3, 8, 5, enable_caching, policy)
    events = check_e1(scenario)
    assert events["preempted"] > 0 and events["resumed"] > 0 and events["chunks"] > 0
    assert (events["hits"] > 0) == enable_caching
    assert events["sampled"] == 3 * MAX_TOKENS


@pytest.mark.slow
def test_the_same_prompts_in_float32_give_the_same_text_here():
    """Not a promise of float32, whose ties can break either way; a guard on the dtype switch."""
    prompt = TEXTS[0].decode()
    single = LLMEngine(num_blocks=64, block_size=16).generate(
        [prompt], SamplingParams(max_tokens=8)
    )
    double = LLMEngine(num_blocks=64, block_size=16, dtype="float64").generate(
        [prompt], SamplingParams(max_tokens=8)
    )
    assert single[0].outputs[0].text == double[0].outputs[0].text


@pytest.mark.slow
def test_float64_logits_do_not_change_with_the_batch():
    """Eight copies of a prompt beside it: rows equal to rounding."""
    row = dense_logits(list(TEXTS[2]))[-1]
    engine = LLMEngine(num_blocks=64, block_size=16, enable_prefix_caching=False, model=model())
    recorder = engine.model = Recorder(engine.model)
    for _ in range(8):
        engine.add_request(list(TEXTS[2]))
    engine.step()
    assert np.abs(recorder.logits - row).max() < TOLERANCE
