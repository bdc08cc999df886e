"""Speculation changes how fast, never what: greedy token for token, sampled in law."""

from __future__ import annotations

import functools
import itertools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mini_vllm import LLM, EngineParts, LLMEngine, SamplingParams
from mini_vllm.batch import ForwardBatch
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.transformer import ModelConfig, Transformer
from mini_vllm.observe.trace import traced_steps
from mini_vllm.spec_decode.metrics import SpecDecodingStats
from mini_vllm.spec_decode.mtp import module_shapes

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
EOS = 256


@functools.cache
def tiny(noise: float = 0.0) -> Transformer:
    """Two layers of 16 in float64; `noise` makes a drafter that often, not always, agrees."""
    config = ModelConfig(257, 16, 24, 2, 2, 1, 8, 128)
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0, 0.4, s) for n, s in expected_shapes(config).items()}
    wrong = np.random.default_rng(1)
    weights = {n: w + noise * wrong.normal(0, 0.4, w.shape) for n, w in weights.items()}
    return Transformer(config, weights, "float64")


@functools.cache
def module_folder() -> Path:
    """A module for `tiny`: it reads the token alone, through the target's own first layer, so that
    it agrees now and then; every weight is drawn a little off, so that every one matters."""
    target = tiny()
    shapes = module_shapes(target.config)
    rng = np.random.default_rng(7)
    weights = {name: rng.normal(0, 0.1, shape) for name, shape in shapes.items()}
    for name in shapes:
        if "norm" in name:
            weights[name] += 1.0
    weights["input_proj.weight"] += 2 * np.eye(16, 32, 16) + 0.5 * np.eye(16, 32)
    folder = Path(tempfile.mkdtemp())
    config = {
        "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "vocab_size": 257,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"model.mtp_layers.0.{n}": w.astype(np.float32) for n, w in weights.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


# ---------------------------------------------------------------------- greedy: token for token


def workload(seed: int) -> tuple[dict[str, Any], list[list[int]], list[SamplingParams]]:
    """Knobs, prompts and wishes: every combination of what could go wrong, small and tight."""
    rng = random.Random(seed)
    k = rng.choice((1, 2, 3, 5))
    is_async = rng.random() < 0.4
    drafter: dict[str, Any] = {"method": "ngram_gpu" if is_async else "ngram"}
    drafter["prompt_lookup_min"] = rng.choice((1, 1, 2))
    if rng.random() < 0.6:
        drafter = {"method": "draft_model", "model": tiny(rng.choice((0.0, 0.02, 0.1, 1.0)))}
    if seed % 4 == 3:
        drafter = {"method": "mtp", "model": module_folder()}
    size = rng.choice((2, 4, 8))
    text = [rng.randrange(5) for _ in range(40)]
    prompts = [
        (text[: rng.randint(1, 24)] + [rng.randrange(257)] * rng.randint(0, 2)) or [1]
        for _ in range(rng.randint(1, 6))
    ]
    prompts += [list(p) for p in prompts if rng.random() < 0.4]
    wishes = []
    for _ in prompts:
        most = rng.randint(1, 24)
        wishes.append(
            SamplingParams(
                max_tokens=most,
                min_tokens=rng.choice((0, 0, min(3, most))),
                ignore_eos=rng.random() < 0.3,
                stop_token_ids=rng.choice(((), (), tuple(rng.sample(range(257), 60)))),
            )
        )
    longest = max(len(p) + w.max_tokens for p, w in zip(prompts, wishes, strict=True))
    num_seqs = rng.choice((1, 2, 4, 8))
    limit = rng.choice((128, 128, max(len(p) for p in prompts) + 1 + rng.randint(3, 12)))
    if seed % 5 == 3 and "model" in drafter:
        drafter["max_model_len"] = min(limit, 128) * 2 // 3
    knobs = {
        "speculative_config": {**drafter, "num_speculative_tokens": k},
        "async_scheduling": is_async,
        "block_size": size,
        "num_blocks": 2 + -(-(longest + k) // size) + rng.choice((0, 1, 4, 40)),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": 2 * num_seqs + rng.choice((0, 2, 8, 64)),
        "long_prefill_token_threshold": rng.choice((0, 0, 3, 7)),
        "enable_prefix_caching": rng.random() < 0.6,
        "max_model_len": min(limit, 128),
        "policy": rng.choice(("fcfs", "fcfs", "priority")),
    }
    return knobs, prompts, wishes


@functools.cache
def alone(limit: int) -> LLMEngine:
    """Plain decoding, roomy, one request at a time, no cache."""
    return LLMEngine(
        tiny(), dtype="float64", enable_prefix_caching=False, max_model_len=limit, num_blocks=300
    )


def compare(seed: int) -> Counter[str]:
    """Run one workload with drafts; what happened in it. Fails where a token differs."""
    knobs, prompts, wishes = workload(seed)
    for wish, prompt in zip(wishes, prompts, strict=True):
        if len(prompt) + wish.min_tokens > knobs["max_model_len"]:
            object.__setattr__(wish, "min_tokens", 0)
    engine = LLMEngine(tiny(), dtype="float64", **knobs)
    seen: Counter[str] = Counter()
    update = engine.scheduler.update_from_output

    def watched(plan: Any, sampled: Any) -> Any:
        before = {r.request_id: r.num_tokens for r in plan.scheduled_requests}
        ended = update(plan, sampled)
        for request in plan.scheduled_requests:
            drafts = plan.spec_token_ids.get(request.request_id, ())
            tokens = sampled.get(request.request_id, ())
            kept = request.num_tokens - before[request.request_id]
            seen["accepted"] += max(0, len(tokens) - 1)
            seen["rejected"] += bool(drafts) and len(tokens) <= len(drafts)
            seen["stopped inside"] += request in ended and kept < len(tokens)
        return ended

    def count(plan: Any) -> None:
        seen["preempted"] += len(plan.preempted_req_ids)
        seen["chunks"] += len(plan.scheduled_requests) - len(plan.sampling_req_ids)
        seen["hits"] += sum(map(bool, plan.num_cached_tokens.values()))

    engine.scheduler.update_from_output = watched  # type: ignore[method-assign]
    engine.observers.append(count)
    got = engine.generate(prompts, wishes)
    plain = [
        alone(knobs["max_model_len"]).generate([prompt], wish)[0]
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    for mine, theirs in zip(got, plain, strict=True):
        assert mine.outputs == theirs.outputs, f"seed {seed}"
    seen[f"{knobs['speculative_config']['method']}"] += 1
    seen["async" if knobs["async_scheduling"] else "sync"] += 1
    return seen


HAPPENS = (
    "accepted", "rejected", "stopped inside", "preempted", "chunks", "hits", "async", "sync",
    "ngram", "ngram_gpu", "draft_model", "mtp",
)  # fmt: skip


@pytest.mark.slow
def test_greedy_output_with_drafts_is_that_of_plain_decoding():
    seen = sum((compare(seed) for seed in range(15)), Counter())
    assert all(seen[name] for name in HAPPENS), seen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_greedy_output_with_drafts_is_that_of_plain_decoding_150_times(part):
    seen = sum((compare(seed) for seed in range(50 * part, 50 * part + 50)), Counter())
    assert all(seen[name] for name in HAPPENS), seen


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_drafter_that_is_the_target_is_always_right(is_async):
    """Only if its own K and V are where the block tables say, after hits, chunks, preemptions."""
    text = [1, 2, 3, 4, 5, 6, 7] * 3
    engine = LLMEngine(
        tiny(), dtype="float64", block_size=4, num_blocks=22, max_num_batched_tokens=16,
        max_num_seqs=4, async_scheduling=is_async,
        speculative_config={"method": "draft_model", "model": tiny(), "num_speculative_tokens": 3},
    )  # fmt: skip
    preempted = 0

    def count(plan):
        nonlocal preempted
        preempted += len(plan.preempted_req_ids)

    engine.observers.append(count)
    wish = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.generate([[*text[:n], 9, n] for n in (3, 9, 15, 20)], wish)
    stats = engine.feature("spec_decode").stats
    assert preempted and stats.num_drafts > 20
    # The first drafts after an admission have no slots of their own and may be wrong.
    assert stats.num_accepted_tokens >= stats.num_draft_tokens - 3 * (4 + preempted)
    assert stats.acceptance_rate > 0.8


def test_each_pass_of_the_drafter_serves_the_whole_batch():
    config = {"method": "draft_model", "model": tiny(), "num_speculative_tokens": 4}
    engine = LLMEngine(tiny(), dtype="float64", speculative_config=config)
    steps = []
    engine.observers.append(lambda plan: steps.append(len(plan.scheduled_requests)))
    engine.generate([[1, 2], [3, 4], [5, 6]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert engine.feature("spec_decode").proposer.num_passes <= 4 * len([n for n in steps if n])


# ---------------------------------------------------------------------- sampled: in law

VOCABULARY, LENGTH, DRAWS = 3, 4, 3000
LIMIT = 5.0
"""Standard deviations that chi-square may be above its mean. Under the right law one run in some
10^6 is; the mildest wrong verifier below is at more than twice that."""


class Law:
    """Logits that depend on the last token alone; the rest of the vocabulary is impossible."""

    def __init__(self, seed: int) -> None:
        self.table = np.random.default_rng(seed).normal(0, 0.7, (VOCABULARY, VOCABULARY))

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        logits = np.full((len(batch.logits_indices), 257), -1e9)
        logits[:, :VOCABULARY] = self.table[batch.token_ids[batch.logits_indices] % VOCABULARY]
        return logits

    def chances(self, last: int, temperature: float, top_k: int) -> np.ndarray:
        row = self.table[last] / temperature
        weights = np.exp(row) * (row >= np.sort(row)[-top_k])
        return weights / weights.sum()


def deviation(
    temperature: float = 0.9, top_k: int = VOCABULARY, draws: int = DRAWS, **knobs: Any
) -> float:
    """(chi-square - df) / sqrt(2 df) of that many continuations against the exact law."""
    law, prompt = Law(3), [0]
    for uniform in np.random.default_rng(1).random(14):  # a text the law may have written
        chances = law.chances(prompt[-1], temperature, VOCABULARY)
        prompt.append(int(np.searchsorted(chances.cumsum(), uniform)))
    engine = LLMEngine(law, seed=5, num_blocks=2000, max_num_seqs=100, **knobs)
    wish = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=LENGTH, ignore_eos=True)
    outputs = engine.generate([prompt] * draws, wish)
    assert engine.feature("spec_decode") is not None
    assert engine.feature("spec_decode").stats.num_drafts > draws
    assert 0.05 < engine.feature("spec_decode").stats.acceptance_rate < 0.95
    counts = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    square, cells, rest, rest_seen = 0.0, 0, 0.0, 0
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        expected, last = float(draws), prompt[-1]
        for token in tokens:
            expected *= law.chances(last, temperature, top_k)[token]
            last = token
        if expected < 5:  # chi-square needs a few per cell: the rare ones share one
            rest, rest_seen = rest + expected, rest_seen + counts[tokens]
            continue
        square, cells = square + (counts[tokens] - expected) ** 2 / expected, cells + 1
    if rest > 1:
        square, cells = square + (rest_seen - rest) ** 2 / rest, cells + 1
    return (square - (cells - 1)) / (2 * (cells - 1)) ** 0.5


DRAFT = {"method": "draft_model", "model": Law(4), "num_speculative_tokens": 2}
SLOW_ONES = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"speculative_config": NGRAM},
        {"speculative_config": {**DRAFT, "draft_sample_method": "probabilistic"}},
        pytest.param({"speculative_config": DRAFT}, marks=SLOW_ONES),
        pytest.param({"speculative_config": DRAFT, "async_scheduling": True}, marks=SLOW_ONES),
        pytest.param({"speculative_config": NGRAM, "top_k": 2}, marks=SLOW_ONES),
        pytest.param(
            {"speculative_config": {**DRAFT, "draft_sample_method": "probabilistic"}, "top_k": 2},
            marks=SLOW_ONES,
        ),
    ],
)
def test_sampled_output_has_the_targets_law(knobs):
    assert deviation(**knobs) < LIMIT


def right_verifier() -> SimpleNamespace:
    """The three functions of lab 08-03, in the fewest lines."""

    def accept_prob(p_x, q_x):
        return min(1.0, p_x / q_x) if q_x > 0 else 0.0

    def residual_distribution(p, q):
        rest = np.maximum(p - q, 0.0)
        return rest / rest.sum() if rest.sum() > 1e-12 else p

    def speculative_token(p, q, rng):
        token = int(rng.choice(len(q), p=q))
        if rng.random() < accept_prob(p[token], q[token]):
            return token, True
        return int(rng.choice(len(p), p=residual_distribution(p, q))), False

    return SimpleNamespace(
        accept_prob=accept_prob,
        residual_distribution=residual_distribution,
        speculative_token=speculative_token,
    )


@pytest.mark.slow
def test_a_verifier_part_serves_and_a_wrong_one_shows():
    right, wrong = right_verifier(), right_verifier()
    wrong.residual_distribution = lambda p, q: p  # the token that was just refused may come again
    config = {**DRAFT, "draft_sample_method": "probabilistic"}
    served = deviation(
        draws=1000,
        speculative_config=config,
        parts=EngineParts(rooms={"spec_decode": {"verifier": right}}),
    )
    assert served < LIMIT
    shown = deviation(
        draws=1000,
        speculative_config=config,
        parts=EngineParts(rooms={"spec_decode": {"verifier": wrong}}),
    )
    assert shown > 2 * LIMIT


def test_a_drafter_part_serves():
    asked = []

    def ngram_propose(context, n, k):
        asked.append((n, k))
        return [context[-n]] * k if len(context) > n else []

    parts = EngineParts(rooms={"spec_decode": {"drafter": ngram_propose}})
    config = {**NGRAM, "prompt_lookup_max": 2}
    wish = SamplingParams(max_tokens=10, ignore_eos=True)
    drafted = LLM(tiny(), dtype="float64", speculative_config=config, parts=parts)
    plain = LLM(tiny(), dtype="float64").generate([[1, 2, 3]], wish)
    assert drafted.generate([[1, 2, 3]], wish)[0].outputs == plain[0].outputs
    assert {n for n, _ in asked} == {2} and drafted.llm_engine.feature(
        "spec_decode"
    ).stats.num_drafts


# ---------------------------------------------------------------------- small things


def test_a_trace_shows_what_was_drafted_and_kept():
    engine = LLMEngine(tiny(), dtype="float64", speculative_config=NGRAM)
    engine.add_request([1, 2, 1, 2, 1], SamplingParams(max_tokens=12, ignore_eos=True))
    records = list(traced_steps(engine))
    stats = engine.feature("spec_decode").stats
    assert sum(len(t) for r in records for t in r.drafts.values()) == stats.num_draft_tokens > 0
    assert sum(sum(r.num_accepted.values()) for r in records) <= stats.num_accepted_tokens
    assert (
        "drafts" not in records[0].to_json()
        and "drafts" in next(r for r in records if r.drafts).to_json()
    )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ends_before", [False, True])
def test_a_row_without_a_token_behind_the_end_or_behind_drafts_changes_nothing(
    is_async, ends_before
):
    """The fourth row leaves no token; a stop id may end the request on the third."""
    [whole] = LLMEngine(tiny()).generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    tokens = whole.outputs[0].token_ids
    stops = (tokens[2],) if ends_before else ()
    wish = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=stops, logprobs=1)

    def fourth(request: Any, row: np.ndarray) -> np.ndarray:
        return np.full_like(row, -np.inf) if request.num_output_tokens == 3 else row

    def oracle(context: Any, n: int, k: int) -> list[int]:
        return tokens[len(context) - 3 :][:k]

    method = "ngram_gpu" if is_async else "ngram"
    drafted = LLMEngine(
        tiny(), logits_processors=[fourth],
        parts=EngineParts(rooms={"spec_decode": {"drafter": oracle}}),
        async_scheduling=is_async, speculative_config=NGRAM | {"method": method},
    )  # fmt: skip
    plain = LLMEngine(tiny(), logits_processors=[fourth])
    answers = [made.generate([[1, 2, 3]], wish)[0].outputs[0] for made in (plain, drafted)]
    assert answers[0].finish_reason == ("stop" if ends_before else "error")
    assert answers[1].token_ids == answers[0].token_ids == tokens[:3]
    assert answers[1].finish_reason == answers[0].finish_reason
    assert answers[1].stop_reason == answers[0].stop_reason
    assert len(answers[1].logprobs or ()) == 3


def test_the_stats_keep_upstreams_denominators():
    stats = SpecDecodingStats(5)
    stats.observe_draft(5, 5)
    stats.observe_draft(5, 1)
    stats.observe_draft(2, 0)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1, 1, 1]
    assert stats.mean_acceptance_length == 3.0
    assert stats.log_line(2.0) == (
        "SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 3.00 tokens/s, "
        "Drafted throughput: 6.00 tokens/s, Accepted: 6 tokens, Drafted: 12 tokens, "
        "Per-position acceptance rate: 0.667, 0.333, 0.333, 0.333, 0.333, "
        "Avg Draft acceptance rate: 50.0%"
    )
    assert SpecDecodingStats(3).log_line(1.0) == ""
