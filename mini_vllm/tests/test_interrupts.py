"""A step that raises did not happen: interrupts at random lines, failing parts, Ctrl-C.

The model is a small random transformer that reads K and V through block tables, so that a block
that is indexed and was never computed shows as another answer.
"""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mini_vllm
from mini_vllm import LLM, EngineParts, LLMEngine, Sampler, SamplingParams
from mini_vllm.attention import paged_attention
from mini_vllm.batch import ForwardBatch
from mini_vllm.llm import stream_text
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.transformer import ModelConfig, Transformer
from mini_vllm.outputs import text_of

PACKAGE = str(Path(mini_vllm.__file__).parent)
UNTRACED = f"{PACKAGE}/interrupts.py"
"""What holds interrupts back: a real one cannot arrive there."""

PROMPTS = ["the block table", "the block size of", "a block", "the block table and"]
KNOBS: dict[str, Any] = {"num_blocks": 14, "block_size": 4, "max_num_batched_tokens": 16}
POINTS = 250
"""Interrupts per case; eight cases make the 2,000."""


@functools.cache
def tiny() -> Transformer:
    """Two layers of 16, float64, weights drawn once: alone or in a batch, bit for bit the same."""
    config = ModelConfig(257, 16, 24, 2, 2, 1, 8, 128)
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0, 0.4, s) for n, s in expected_shapes(config).items()}
    return Transformer(config, weights, "float64")


def engine(**knobs: Any) -> LLMEngine:
    return LLMEngine(tiny(), **KNOBS | knobs)


def params(sampled: bool) -> SamplingParams:
    if sampled:
        return SamplingParams(temperature=1.0, seed=7, max_tokens=7, ignore_eos=True)
    return SamplingParams(max_tokens=7, ignore_eos=True)


def run(engine: LLMEngine, way: str, sampled: bool) -> list[str]:
    """Four requests that share prefixes and preempt each other, by `generate` or as two streams."""
    if way == "generate":
        outputs = engine.generate(PROMPTS, params(sampled))
        return [output.outputs[0].text for output in outputs]
    first = stream_text(engine, PROMPTS[0], params(sampled))
    begun = [next(first, ""), next(first, "")]
    second = "".join(stream_text(engine, PROMPTS[3], params(sampled)))
    left = stream_text(engine, PROMPTS[1], params(sampled))
    next(left, "")
    left.close()  # left early: aborted
    return ["".join([*begun, *first]), second]


class Interrupted:
    """Raise KeyboardInterrupt before the `at`-th line that the package runs."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> Interrupted:
        sys.settrace(self.called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def called(self, frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        return self.line if path.startswith(PACKAGE) and path != UNTRACED else None

    def line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.line


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize("caching", [True, False])
def test_an_interrupt_anywhere_leaves_an_engine_that_answers_as_a_fresh_one(
    caching, way, async_scheduling
):
    make = functools.partial(
        engine, enable_prefix_caching=caching, async_scheduling=async_scheduling
    )
    came = interrupt(make, way, POINTS)
    assert came > POINTS // 2


NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_an_interrupt_anywhere_leaves_an_engine_that_drafts_as_a_fresh_one(
    method, async_scheduling
):
    """Drafts and what the drafter has written go with the step that did not happen."""
    config: dict[str, Any] = {**NGRAM, "method": "ngram_gpu" if async_scheduling else "ngram"}
    if method == "draft_model":
        config = {"method": method, "model": tiny(), "num_speculative_tokens": 2}
    make = functools.partial(
        engine,
        speculative_config=config,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=24,
        max_num_seqs=8,
    )
    for way in ("generate", "stream"):
        assert interrupt(make, way, 40) > 20


def interrupt(make: Callable[[], LLMEngine], way: str, points: int) -> int:
    """Interrupt runs of one engine at `points` random lines; how many interrupts came.

    After each the engine holds nothing, and answers as a fresh one.
    """
    expected = {sampled: run(make(), way, sampled) for sampled in (False, True)}
    alone = {sampled: make().generate([PROMPTS[3]], params(sampled)) for sampled in (False, True)}
    with Interrupted(1 << 60) as counted:
        run(make(), way, False)
    num_lines = (1 << 60) - counted.left
    rng = random.Random(f"{way} {num_lines}")
    tried, came = make(), 0
    for point in range(points):
        sampled = bool(point % 2)
        try:
            with Interrupted(rng.randrange(1, num_lines)):
                got = run(tried, way, sampled)
        except KeyboardInterrupt:
            came += 1
        else:
            assert got == expected[sampled]
        where = f"after interrupt {came}, point {point}"
        assert not tried.has_unfinished_requests(), f"{where}: a request is in limbo"
        assert not tried.requests and not tried.row_sampler.generators, where
        free = tried.scheduler.kv.block_pool.get_num_free_blocks()
        assert free == KNOBS["num_blocks"] - 1, f"{where}: blocks leaked"
        (after,) = tried.generate([PROMPTS[3]], params(sampled))
        assert after.outputs == alone[sampled][0].outputs, f"{where}: another answer"
    return came


class Fails:
    """Raises at the `at`-th call, as a part of the engine may."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left, self.error = at, error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("a part failed")


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["attention", "sampler", "model", "observer", "processor"])
@pytest.mark.parametrize("at", [1, 2, 3, 7])
def test_a_step_that_raised_can_be_taken_again(part, error, at):
    """`add_request` and `step` by hand: nothing is lost, the answers are those of no failure."""
    wanted = run(engine(), "generate", True)
    fails = Fails(at, error)

    def attention(*args: Any) -> np.ndarray:
        fails()
        return paged_attention(*args)

    class Failing(Sampler):
        def sample(self, *args: Any) -> int:
            fails()
            return super().sample(*args)

    class Model(Transformer):
        def forward(self, batch: ForwardBatch) -> np.ndarray:
            fails()
            return super().forward(batch)

    made = engine()
    if part == "attention":
        made.model = Transformer.__new__(Transformer)
        made.model.__dict__ |= vars(tiny()) | {"attention": attention}
    elif part == "model":
        made.model = Model.__new__(Model)
        made.model.__dict__ |= vars(tiny())
    elif part == "sampler":
        made.sampler = Failing()
    elif part == "observer":
        made.observers.append(lambda plan: fails())
    else:
        made.logits_processors.append(lambda request, row: (fails(), row)[1])
    ids = [made.add_request(prompt, params(True)) for prompt in PROMPTS]
    requests = [made.requests[request_id] for request_id in ids]
    failures = 0
    while made.has_unfinished_requests():
        try:
            made.step()
        except error:
            failures += 1
    assert failures == 1
    assert [text_of(r, made.tokenizer) for r in requests] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("nonsense", [300, -1, None, "x", 1.5, [3]])
def test_a_sampler_that_returns_nonsense_is_named_and_can_be_mended(nonsense):
    class Wrong(Sampler):
        def sample(self, *_: Any) -> Any:
            return nonsense

    llm = LLM(tiny(), parts=EngineParts(sampler=Wrong), **KNOBS)
    with pytest.raises(
        RuntimeError, match=r"sampler part Wrong: returned .*need a token id from 0"
    ):
        llm.generate(PROMPTS[:2])
    llm.llm_engine.sampler = Sampler()
    assert (
        llm.generate(PROMPTS[:1])[0].outputs
        == LLM(tiny(), **KNOBS).generate(PROMPTS[:1])[0].outputs
    )


def test_a_model_of_the_wrong_shape_is_named():
    class Flat:
        def forward(self, batch: ForwardBatch) -> np.ndarray:
            return np.zeros(257)

    with pytest.raises(RuntimeError, match="model: forward returned shape"):
        LLM(Flat()).generate("x")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_the_one_request(bad, temperature):
    """The request that starts with z is answered by `bad` after two tokens, the other as ever."""

    class Sick(Transformer):
        def forward(self, batch: ForwardBatch) -> np.ndarray:
            logits = super().forward(batch)
            for row, index in enumerate(batch.logits_indices):
                if batch.positions[index] >= 4 and sick.all_token_ids[:1] == [ord("z")]:
                    logits[row, 5] = bad
            return logits

    made = engine()
    made.model = Sick.__new__(Sick)
    made.model.__dict__ |= vars(tiny())
    asked = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=1)
    sick = made.requests[made.add_request("zzz", asked)]
    while not sick.is_finished:
        made.step()
    assert (sick.finish_reason, sick.num_output_tokens) == ("error", 2)
    assert "logits" in str(sick.stop_reason)
    sick.all_token_ids[:1] = [0]
    (after,) = made.generate(["zzz"], asked)
    assert after.outputs[0].finish_reason == "length"


def test_a_prompt_row_that_is_no_number_ends_its_request_too():
    class Sick(Transformer):
        def forward(self, batch: ForwardBatch) -> np.ndarray:
            logits = super().forward(batch)
            logits[batch.positions[batch.logits_indices] == 1] = np.nan
            return logits

    made = engine()
    made.model = Sick.__new__(Sick)
    made.model.__dict__ |= vars(tiny())
    wishes = [SamplingParams(max_tokens=2, prompt_logprobs=n, ignore_eos=True) for n in (1, None)]
    asked, other = made.generate(["a block table"] * 2, wishes)
    assert asked.outputs[0].finish_reason == "error"
    assert "NaN" in str(asked.outputs[0].stop_reason)
    assert other.outputs[0].finish_reason == "length"


@pytest.mark.usefixtures("usual_signals")
def test_ctrl_c_waits_until_an_abort_is_complete():
    made = engine()
    request_id = made.add_request("abcdef", params(False))
    made.step()
    free = made.scheduler.kv.free

    def interrupted(request):
        signal.raise_signal(signal.SIGINT)
        free(request)

    made.scheduler.kv.free = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.abort_request(request_id)
    assert not made.requests
    assert made.scheduler.kv.block_pool.get_num_free_blocks() == KNOBS["num_blocks"] - 1


def test_an_interrupt_while_several_completions_are_queued_leaves_their_id_free():
    made = LLMEngine("toy")
    several = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=3)
    at, interrupted = 0, True
    while interrupted:
        at, num_lines, interrupted = at + 1, 0, False
        request_id, requests = made.inputs.process("hi", several, f"id{at}")

        def trace(frame, event, argument, at=at):
            nonlocal num_lines, interrupted
            name = frame.f_code.co_filename
            if not name.startswith(PACKAGE) or name in (UNTRACED, __file__):
                return None
            if event == "line":
                num_lines += 1
                if num_lines == at:
                    interrupted = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            made.queue_requests(request_id, requests)
        sys.settrace(None)
        if not made.requests:
            made.add_request("hi", several, request_id=request_id)
        made.abort_request(request_id)  # an interrupt after the last change has changed nothing
        assert not made.requests and request_id not in made._parents
    assert at > 50


def test_an_open_stream_keeps_its_text_whatever_else_the_engine_does():
    made = engine()
    alone = "".join(stream_text(engine(), PROMPTS[0], params(False)))
    stream = stream_text(made, PROMPTS[0], params(False))
    begun = next(stream, "")
    made.generate(PROMPTS[1:], params(False))
    other = stream_text(made, PROMPTS[0], params(False))
    next(other, "")
    assert begun + "".join(stream) == alone
    other.close()


REFUSED = [
    (lambda e: e.generate(["a", None]), "prompt=None"),
    (lambda e: e.generate(["a", "b"], [SamplingParams(), "x"]), "sampling_params='x'"),
    (lambda e: e.generate("abc"), "prompts='abc'"),
    (lambda e: e.add_request("a", priority="x"), "priority='x'"),
    (lambda e: e.add_request("a", arrival_time="x"), "arrival_time='x'"),
    (lambda e: e.add_request("a", arrival_time=float("nan")), "arrival_time=nan"),
    (lambda e: e.add_request("a", request_id=5), "request_id=5"),
    (lambda e: e.add_request("a", cache_salt=""), "cache_salt=''"),
    (lambda e: e.add_request([True]), "token id True"),
    (lambda e: e.add_request([1.0]), "token id 1.0"),
    (lambda e: e.add_request({1: 2}), "prompt="),
    (
        lambda e: e.add_request("a" * 20, SamplingParams(min_tokens=30, max_tokens=40)),
        "min_tokens=30",
    ),
    (
        lambda e: e.add_request(
            "a", SamplingParams(min_tokens=1, stop_token_ids=tuple(range(257)))
        ),
        "min_tokens=1: need 0, since every token id",
    ),
]


@pytest.mark.parametrize(("call", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_a_refused_call_changes_nothing(call, named):
    made = engine(max_model_len=40, policy="priority", num_blocks=64)
    kept = made.add_request("abc", params(False))
    made.step()
    free = made.scheduler.kv.block_pool.get_num_free_blocks()
    with pytest.raises(ValueError, match=named.replace("(", r"\(").replace("[", r"\[")):
        call(made)
    assert list(made.requests) == [kept]
    assert made.scheduler.kv.block_pool.get_num_free_blocks() == free


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"seed": 1.5}, "seed=1.5"),
        ({"max_num_seqs": 1.5}, "max_num_seqs=1.5"),
        ({"max_model_len": float("nan")}, "max_model_len=nan"),
        ({"long_prefill_token_threshold": float("nan")}, "long_prefill_token_threshold=nan"),
        ({"num_blocks": "8"}, "num_blocks='8'"),
        ({"num_blocks": 10**9}, "num_blocks=1000000000"),
        ({"block_size": 10**8}, "block_size=100000000"),
        ({"model": None}, "model=None"),
        ({"async_scheduling": "yes"}, "async_scheduling='yes': need True or False"),
        ({"enable_chunked_prefill": "no"}, "enable_chunked_prefill='no'"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching=None"),
        ({"forget_withdrawn_blocks": 1}, "forget_withdrawn_blocks=1"),
        ({"enable_lora": "x"}, "enable_lora='x'"),
        ({"parts": 5}, "parts=5: need EngineParts"),
        ({"config": 5}, "config=5: need an EngineConfig"),
        ({"gates": 5}, "gates=5: need a sequence"),
        ({"gates": [5]}, "gates=5: need an object with admission"),
        ({"logits_processors": [5]}, "logits_processors holds 5: need a function"),
        ({"tokenizer": 5}, "tokenizer=5: need an object with encode"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2': need an object with"),
        ({"dtype": "x"}, "dtype='x': need float32 or float64"),
        ({"enable_caching": True}, "enable_caching=True: no such argument"),
    ],
)
def test_an_engine_argument_of_the_wrong_kind_is_named(knobs, named):
    with pytest.raises(ValueError, match=named):
        LLMEngine(**{"model": "toy"} | knobs)


def test_a_positive_temperature_below_the_least_is_raised_to_it():
    """As upstream: a smaller one overflows, and would be greedy in all but name."""
    assert SamplingParams(temperature=1e-308).temperature == 0.01
    assert LLM("toy").generate("x", SamplingParams(temperature=1e-308, seed=1))[0].finished


def test_a_prompt_beyond_the_models_vocabulary_is_refused():
    config = ModelConfig(100, 16, 24, 1, 2, 1, 8, 64)
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0, 0.4, s) for n, s in expected_shapes(config).items()}
    made = LLMEngine(Transformer(config, weights))
    with pytest.raises(ValueError, match="token id 120: need integers from 0 to 99"):
        made.add_request("x")
    assert made.generate(["!"], params(False))[0].finished
