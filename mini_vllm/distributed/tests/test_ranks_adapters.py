"""Adapters over tensor ranks: plans, slots, logits and texts are those of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.lora.request import LoRARequest
from mini_vllm.tests.lora_support import EXPERT_KINDS, KINDS, write_adapter
from mini_vllm.tests.ranks_support import ALL_BIASES, DENSE, MOE, TOLERANCE, RandomSource, ranked

SOURCES = {
    "dense": RandomSource(DENSE),
    "biases": RandomSource(ALL_BIASES),
    "moe": RandomSource(MOE),
}
SHARDED = {"fully_sharded_loras": True}


@dataclass
class Served:
    """What an engine made of a workload."""

    tokens: list[list[int]] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    """Logits, in the order in which they were sampled from."""
    slots: dict[str, float] = field(default_factory=dict)
    preempted: int = 0
    hits: int = 0
    mixed: int = 0
    """Steps with several adapters and the base model."""

    def worst(self, other: Served) -> float:
        """The largest difference of two logits of the same row."""
        assert len(self.rows) == len(other.rows)
        return max(np.abs(a - b).max() for a, b in zip(self.rows, other.rows, strict=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, list[LoRARequest]]:
    """By model, an adapter of each of `KINDS`, or of `EXPERT_KINDS`."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: [
            LoRARequest(
                f"a{n}", n,
                str(write_adapter(folder / name / str(n), seed=n, config=source.config, **kind)),
            )
            for n, kind in enumerate(EXPERT_KINDS if name == "moe" else KINDS, start=1)
        ]
        for name, source in SOURCES.items()
    }  # fmt: skip


def workload(seed: int, adapters: list[LoRARequest]) -> tuple[list[Any], list[Any], Any, Any]:
    """Prompts that share beginnings, whose adapters they are, how the engine is bounded."""
    rng = np.random.default_rng(seed)
    first = rng.integers(1, 60, 13).tolist()
    prompts = [
        [*first[: int(rng.integers(0, 14))], *rng.integers(1, 60, int(rng.integers(1, 9))).tolist()]
        for _ in range(8)
    ]
    chosen = [adapters[i] for i in rng.permutation(len(adapters))[:4]]
    wanted = [[None, *chosen][int(i)] for i in rng.integers(0, 5, len(prompts))]
    knobs = {
        "dtype": "float64", "block_size": 4, "num_blocks": int(rng.integers(12, 22)),
        "max_num_batched_tokens": int(rng.integers(9, 30)), "max_num_seqs": 4,
        "enable_lora": True, "max_loras": int(rng.integers(2, 5)), "max_lora_rank": 8,
    }  # fmt: skip
    params = SamplingParams(
        max_tokens=int(rng.integers(5, 14)), ignore_eos=True, seed=seed,
        temperature=float(rng.choice([0.0, 0.7])),
    )  # fmt: skip
    return prompts, wanted, knobs, params


def serve(engine: LLMEngine, prompts: Any, wanted: Any, params: Any) -> Served:
    """Every step of a workload noted."""
    got, numbers = Served(), dict[str, int]()

    def note(plan) -> None:
        for name in plan.num_scheduled_tokens:
            numbers.setdefault(name, len(numbers))
        got.plans.append([(numbers[n], count) for n, count in plan.num_scheduled_tokens.items()])
        got.preempted += len(plan.preempted_req_ids)
        got.hits += sum(plan.num_cached_tokens.values())
        got.mixed += len({r.extra_keys for r in plan.scheduled_requests}) > 2

    def keep(request, row: np.ndarray) -> np.ndarray:
        got.rows.append(row.copy())
        return row

    engine.observers.append(note)
    engine.logits_processors.append(keep)
    outputs = engine.generate(prompts, params, lora_request=wanted)
    got.tokens = [list(out.outputs[0].token_ids) for out in outputs]
    got.slots = engine.feature("lora").stats()
    return got


def compare(model: str, size: int, adapters: list[LoRARequest], seeds: range, **more: Any) -> None:
    """Workloads, each served by one process and by `size` ranks."""
    counts = np.zeros(4)
    for seed in seeds:
        prompts, wanted, knobs, params = workload(seed, adapters)
        one = LLMEngine(SOURCES[model].transformer(), **knobs)
        alone = serve(one, prompts, wanted, params)
        engine = ranked(SOURCES[model], tensor_parallel_size=size, **knobs, **more)
        got = serve(engine, prompts, wanted, params)
        assert got.worst(alone) < TOLERANCE, seed
        assert (got.tokens, got.plans, got.slots) == (alone.tokens, alone.plans, alone.slots), seed
        counts += alone.preempted, alone.hits, alone.mixed, alone.slots["evictions"]
    assert counts.all(), f"the workloads show too little: {counts}"


CASES = [
    ("dense", 1, {}), ("dense", 2, {}), ("biases", 4, {}), ("moe", 2, {}), ("moe", 4, {}),
    ("dense", 2, SHARDED), ("biases", 4, SHARDED), ("dense", 4, SHARDED),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size", "more"), CASES,
    ids=[f"{m}-tp{n}{'-sharded' if more else ''}" for m, n, more in CASES],
)  # fmt: skip
def test_ranks_adapt_as_one_process(model, size, more, made):
    compare(model, size, made[model], range(6), **more)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_ranks_send_for_adapters(sharded, made):
    """Nothing, unless A and B are both cut: then the shrunk rows, once for each layer adapted."""
    engine = ranked(
        SOURCES["dense"], tensor_parallel_size=2, enable_lora=True, max_lora_rank=8,
        fully_sharded_loras=sharded,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1)
    plain, adapted = [], []
    for stats, adapter in ((plain, None), (adapted, made["dense"][0])):
        engine.generate([[1, 2, 3]], params, lora_request=adapter)
        stats.append(engine.feature("distributed").comm_stats()[0])
    added = adapted[0].calls - plain[0].calls
    layers = DENSE.num_hidden_layers
    by_operation = {
        kind: sum(n for (operation, _), n in added.items() if operation == kind)
        for kind in ("all_gather", "all_reduce")
    }
    assert by_operation == dict.fromkeys(by_operation, 2 * layers * sharded)
    sent = adapted[0].total_bytes() - plain[0].total_bytes()
    # float64: q, k, v, gate and up gather 4 of 8 columns each; o and down add up 8 each
    assert sent == sharded * layers * 3 * 8 * (5 * 4 + 2 * 8)


def test_a_slot_that_was_half_filled_on_the_ranks_is_filled_again(made):
    knobs = {"enable_lora": True, "max_lora_rank": 8}
    engine = ranked(SOURCES["dense"], tensor_parallel_size=2, **knobs)
    model = engine.feature("lora").model
    fill = model.set_adapter

    def half(slot, modules) -> None:
        fill(slot, dict(list(modules.items())[:1]))
        model.set_adapter = fill
        raise KeyboardInterrupt

    model.set_adapter = half
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    first = engine.add_request([1, 2, 3], params, lora_request=made["dense"][0])
    request = engine.requests[first]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while not request.is_finished:
        engine.step()
    alone = LLMEngine(SOURCES["dense"].transformer(), dtype="float64", **knobs)
    [expected] = alone.generate([[1, 2, 3]], params, lora_request=made["dense"][0])
    assert request.output_token_ids == list(expected.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"tensor_parallel_size": 4, "max_lora_rank": 1}, "need a divisor of max_lora_rank=1"),
        ({"tensor_parallel_size": 1}, "need tensor_parallel_size of 2 or more"),
        (
            {"model": "moe", "tensor_parallel_size": 2},
            "fully_sharded_loras=True: need a model without experts",
        ),
        ({"fully_sharded_loras": 1}, "fully_sharded_loras=1: need True or False"),
    ],
)
def test_what_fully_sharded_adapters_need_is_said(knobs, words):
    knobs = {"model": "dense", "enable_lora": True, "fully_sharded_loras": True} | knobs
    with pytest.raises(ValueError, match=words):
        ranked(SOURCES[knobs.pop("model")], **knobs)
