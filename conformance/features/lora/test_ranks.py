"""Adapters over tensor ranks as the whole real engine served them, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance import parts, recording
from conformance.features.lora import faults, steps, texts
from conformance.features.lora.lora_gathered import HIDDEN
from conformance.features.lora.lora_shards import SIZES
from mini_vllm import LLM, SamplingParams
from mini_vllm.distributed.collectives import CommStats, Communicator
from mini_vllm.distributed.config import local_config
from mini_vllm.distributed.groups import Place
from mini_vllm.lora.config import LoRAConfig
from mini_vllm.lora.layers import Step
from mini_vllm.lora.ranks import ShardedColumnLinear, lora_part
from mini_vllm.lora.weights import Pair, projections
from mini_vllm.models.moe import MoeConfig
from mini_vllm.models.transformer import ModelConfig


@pytest.mark.slow
@pytest.mark.parametrize("run", steps.RUNS)
def test_every_step_and_text_is_the_real_engines_on_as_many_ranks(run: str) -> None:
    wrong, line = steps.compare(run)
    assert not wrong, (line, wrong[:3])


@pytest.mark.parametrize("run", ["tp2", "tp2-sharded"])
def test_two_tensor_ranks_of_the_real_engine_adapt_as_one(run: str) -> None:
    one, two = (steps.kept(name)["recording"] for name in ("one", run))
    for name in ("events", "steps", "outputs"):
        assert two[name] == one[name]


def test_the_recorded_steps_skip_preempt_and_adopt_blocks() -> None:
    entry = steps.kept("tp2")["recording"]
    assert sum(bool(step["skipped_waiting"]) for step in entry["steps"]) > 100
    assert sum(len(step["preempted"]) for step in entry["steps"]) > 10
    adapters = {add["lora"] for event in entry["events"] for add in event["add"]}
    assert len(adapters) == 4 > entry["config"]["max_loras"]


@pytest.mark.slow
def test_the_texts_of_three_adapters_and_the_base_on_two_ranks_are_the_real_engines() -> None:
    found = texts.kept("texts-lora-tp2")
    assert found["outputs"] == texts.kept()["outputs"]
    assert not any(texts.differing(found, texts.mini_ranks(found)).values())


@pytest.mark.slow
def test_a_text_under_another_adapter_is_another() -> None:
    """So the texts show whose adapter each request had."""
    entry = steps.kept("one")["recording"]
    turned = [
        {**event, "add": [{**add, "lora": add["lora"] % 4 + 1} for add in event["add"]]}
        for event in entry["events"]
    ]
    said = steps.mini("one", {**entry, "events": turned})
    same = [name for name, tokens in entry["outputs"].items() if said[name] == tokens]
    assert len(same) <= 2


@pytest.mark.slow
def test_at_the_pin_two_ranks_with_a_whole_end_the_engine_on_a_processor(tmp_path) -> None:
    """Ours answer, as the real ones do once they gather nothing: the recording "tp2"."""
    [found] = recording.lines(texts.KEPT / "lora-faults-tp2.jsonl.gz")
    assert found["run"] == "two ranks" and "einsum" in found["error"]
    max_loras, prompts, name, _ = faults.RANK_RUNS["two ranks"]
    llm = LLM(
        faults.MODEL, enable_lora=True, max_loras=max_loras, max_lora_rank=8,
        tensor_parallel_size=2,
    )  # fmt: skip
    folder = texts.write_ends(tmp_path)
    wanted = texts.adapter(name, names=tuple(texts.ENDS), folder=folder)
    answers = llm.generate(prompts, SamplingParams(max_tokens=4), [wanted] * len(prompts))
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [4, 4]


# ------------------------------------------------------------------ parts of A and B


def numbered(rows: int, columns: int) -> np.ndarray:
    """[rows, columns] with 1000 * row + column, from (1, 1)."""
    return 1000.0 * np.arange(1, rows + 1)[:, None] + np.arange(1, columns + 1)[None]


def config_of(case: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        64, SIZES["hidden"], SIZES["inner"], 2, case["heads"], case["kv_heads"], SIZES["head_dim"],
        64, moe=MoeConfig(2, 1, SIZES["moe_inner"], True, frozenset({0})),
    )  # fmt: skip


def our_parts(case: dict[str, Any], rank: int) -> dict[str, dict[str, list[int]]]:
    """As a rank of `lora_shards`."""
    config, place = config_of(case), Place.of(rank, case["world"], 1)
    size, sharded = SIZES["rank"], case["fully_sharded"]
    held: dict[str, Pair] = {}
    whole = {p.name: p for packed in projections(config).values() for p in packed}
    for name, p in whole.items():
        pair = numbered(size, p.in_features), numbered(p.out_features, size)
        held[name] = lora_part(name, pair, config, place, sharded)
    if sharded:
        for name, packed in projections(local_config(config, place)).items():
            if name.endswith(("qkv_proj", "mlp.gate_up_proj")) and ".experts." not in name:
                for p, a in zip(packed, shards_of_a(packed, held, place), strict=True):
                    held[p.name] = a, held[p.name][1]
    named = {n.rpartition(".")[2]: n for n in held if n.startswith("model.layers.0.")}
    named |= {f"experts.0.{n}": f"model.layers.1.mlp.experts.0.{n}" for n in named}
    return {name: found(*held[named[name]]) for name in case["ranks"][rank]}


def shards_of_a(packed: Any, held: dict[str, Pair], place: Place) -> list[np.ndarray]:
    """This rank's rows of the A of each packed matrix."""
    transport: Any = SimpleNamespace(rank=place.tp_rank)
    group = Communicator(transport, range(place.tp_size), CommStats())
    config = LoRAConfig(max_lora_rank=SIZES["rank"], fully_sharded_loras=True)
    linear = ShardedColumnLinear(lambda x: x, Step(), config, group, "")
    pair = linear.shard_of(packed, held)
    assert pair is not None
    return np.split(pair[0], len(packed))


def found(a: np.ndarray, b: np.ndarray) -> dict[str, list[int]]:
    return {
        "a_rows": (a[:, 0] // 1000 - 1).astype(int).tolist(),
        "a_columns": (a[0] % 1000 - 1).astype(int).tolist(),
        "b_rows": (b[:, 0] // 1000 - 1).astype(int).tolist(),
    }  # fmt: skip


def test_each_rank_has_the_parts_of_a_and_b_that_the_pinned_wrappers_slice() -> None:
    num_parts = 0
    for case in parts.load("lora_shards"):
        for rank, recorded in enumerate(case["ranks"]):
            assert our_parts(case, rank) == recorded, (case["world"], rank)
            num_parts += len(recorded)
    assert num_parts == 26 * (9 + 7)


@pytest.mark.parametrize("case", parts.load("lora_gathered"), ids=lambda case: case["linear"])
def test_kernels_take_the_first_copy_of_what_ranks_gather_with_a_whole(case) -> None:
    """So at the pin GPUs compute what ours do, after a message that says nothing new; float16
    there, whose roundings of outputs of size 10 are up to 4e-3."""
    config = ModelConfig(64, HIDDEN, 48, 1, 4, 2, 8, 64)
    [names] = [
        [p.name for p in packed]
        for name, packed in projections(config).items()
        if name.endswith(case["linear"])
    ]
    x = np.array(case["inputs"])
    for rank, recorded in enumerate(case["ranks"]):
        theirs, ours = np.array(recorded), np.zeros(np.shape(recorded))
        for row, adapter in enumerate(case["tokens"]):
            if adapter:
                pairs = case["adapters"][adapter - 1]
                held = [
                    lora_part(name, (np.array(a), np.array(b)), config, Place.of(rank, 2, 1))
                    for name, (a, b) in zip(names, pairs, strict=True)
                ]
                ours[row] = np.concatenate([x[row] @ a.T @ b.T for a, b in held])
        assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()
        assert np.abs(2 * ours - theirs).max() > 0.5 * np.abs(theirs).max()
