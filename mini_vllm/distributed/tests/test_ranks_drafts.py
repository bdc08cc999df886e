"""Drafts over tensor ranks: plans, drafts, acceptance and texts are those of one process."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.tests.ranks_support import DENSE, MOE, RandomSource, ranked

SOURCES = {"dense": RandomSource(DENSE), "moe": RandomSource(MOE)}
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
}  # fmt: skip
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3}


def workload(seed, drafts):
    """Prompts that repeat themselves and share a beginning, and how the engine is bounded."""
    rng = np.random.default_rng(seed)
    first = rng.integers(1, 60, 9).tolist()
    prompts = []
    for _ in range(6):
        piece = rng.integers(1, 60, int(rng.integers(2, 6))).tolist()
        prompts.append([*first[: int(rng.integers(0, 10))], *piece * int(rng.integers(1, 4)), 3])
    knobs = {
        "dtype": "float64", "block_size": 4, "num_blocks": int(rng.integers(14, 24)),
        "max_num_batched_tokens": int(rng.integers(9, 30)), "max_num_seqs": 4,
        "speculative_config": drafts,
    }  # fmt: skip
    params = SamplingParams(
        max_tokens=int(rng.integers(6, 16)), ignore_eos=True, seed=seed,
        temperature=float(rng.choice([0.0, 0.7])),
    )  # fmt: skip
    return prompts, knobs, params


def serve(engine, prompts, params):
    """Texts, plans with their drafts, and what was counted."""
    plans, numbers = [], {}

    def note(plan):
        for name in plan.num_scheduled_tokens:
            numbers.setdefault(name, len(numbers))
        plans.append(
            [
                (numbers[name], count, [*plan.spec_token_ids.get(name, ())])
                for name, count in plan.num_scheduled_tokens.items()
            ]
        )
        preempted.extend(plan.preempted_req_ids)

    preempted: list[str] = []
    engine.observers.append(note)
    outputs = engine.generate(prompts, params)
    engine.observers.remove(note)
    stats = engine.feature("spec_decode").stats
    return [list(out.outputs[0].token_ids) for out in outputs], plans, stats, len(preempted)


def compare(model, size, seeds, drafts=NGRAM):
    """Events of the workloads, each served by one process and by `size` ranks."""
    accepted = preempted = 0
    for seed in seeds:
        prompts, knobs, params = workload(seed, drafts)
        alone = serve(LLMEngine(SOURCES[model].transformer(), **knobs), prompts, params)
        engine = ranked(SOURCES[model], tensor_parallel_size=size, **knobs)
        assert serve(engine, prompts, params) == alone, seed
        accepted += alone[2].num_accepted_tokens
        preempted += alone[3]
    assert accepted and preempted, "the workloads show too little"


@pytest.mark.slow
@pytest.mark.parametrize("model", SOURCES)
def test_ranks_draft_and_accept_as_one_process(model):
    compare(model, 2, range(6))


@pytest.mark.slow
def test_a_draft_model_in_the_engines_process_drafts_for_ranks_as_for_one():
    """The target itself drafts: whatever it sees another way would be a draft lost."""
    drafts = DRAFT_MODEL | {"model": SOURCES["dense"].transformer()}
    compare("dense", 2, range(200, 212), drafts)


@pytest.mark.slow
def test_four_ranks_draft_and_accept_as_one_process_in_thirty_workloads():
    compare("dense", 4, range(100, 130))
