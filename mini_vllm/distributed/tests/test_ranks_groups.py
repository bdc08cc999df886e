"""Who works with whom, who holds what, and how partial attention is put together."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm.attention import paged_attention_reference
from mini_vllm.distributed.collectives import bounds
from mini_vllm.distributed.config import ParallelConfig, local_config, padded_vocab
from mini_vllm.distributed.context import local_batch, merge, num_local
from mini_vllm.distributed.experts import owner_of_experts
from mini_vllm.distributed.groups import Place, experts_of, get_pp_indices, rank_groups
from mini_vllm.distributed.shards import part_of
from mini_vllm.models.config import expected_shapes
from mini_vllm.tests.ranks_support import ALL_BIASES, DENSE, MOE, batch_of


def test_eight_ranks_as_four_stages_of_two():
    groups = rank_groups(8, tensor_parallel_size=2, pipeline_parallel_size=4)
    assert groups["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["pp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_eight_ranks_as_two_replicas_of_two_stages_of_two():
    groups = rank_groups(8, 2, 2, 2)
    assert groups["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["dp"] == [[0, 4], [2, 6], [1, 5], [3, 7]] or sorted(groups["dp"]) == [
        [0, 4], [1, 5], [2, 6], [3, 7],
    ]  # fmt: skip
    assert groups["ep"] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_context_groups_are_neighbours_within_a_tensor_group():
    groups = rank_groups(8, tensor_parallel_size=4, decode_context_parallel_size=2)
    assert groups["dcp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (10, 4, [2, 3, 3, 2]),
        (3, 2, [2, 1]),
        (5, 3, [2, 2, 1]),
        (4, 4, [1] * 4),
        (12, 5, [2, 2, 3, 3, 2]),
    ],
)
def test_left_over_layers_go_to_the_middle_stages(layers, stages, sizes):
    ranges = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    assert [len(r) for r in ranges] == sizes
    assert [i for r in ranges for i in r] == list(range(layers))


def test_the_output_rank_is_the_first_of_the_last_stage():
    assert ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2).output_rank == 4
    assert ParallelConfig(tensor_parallel_size=2).output_rank == 0


def test_experts_are_shared_evenly_the_first_ranks_taking_one_more():
    assert [list(experts_of(6, rank, 4)) for rank in range(4)] == [[0, 1], [2, 3], [4], [5]]
    assert owner_of_experts(6, 4).tolist() == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("config", [DENSE, ALL_BIASES, MOE], ids=["dense", "biases", "moe"])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_parts_of_all_ranks_cover_every_tensor(config, tp, expert_parallel):
    """Each number is held; only K and V beyond the KV heads, and what is small, more than once."""
    shared = max(1, tp // config.num_key_value_heads)
    for name, shape in expected_shapes(config).items():
        held = np.zeros(shape, dtype=int)
        for rank in range(tp):
            held[part_of(name, config, Place.of(rank, tp, 1, 1, expert_parallel))] += 1
        times = {"k_proj": shared, "v_proj": shared, "embed_tokens": 1, "lm_head": 1}
        leaf = name.split(".")[-2]
        whole = (
            "norm" in leaf or leaf == "gate" or (leaf in ("o_proj", "down_proj") and held.ndim == 1)
        )
        whole |= expert_parallel and ".experts." in name
        assert (held == (tp if whole else times.get(leaf, 1))).all(), name


def test_a_rank_has_its_own_heads_of_q_k_and_v_and_not_a_slice_of_the_three_joined():
    """Four heads and two KV heads on two ranks: a plain half of the joined matrix is all of Q."""
    second = Place.of(1, 2, 1)
    rows = [
        part_of(f"model.layers.0.self_attn.{p}_proj.weight", DENSE, second) for p in ("q", "k", "v")
    ]
    assert rows == [(slice(16, 32),), (slice(8, 16),), (slice(8, 16),)]


def test_two_ranks_with_one_kv_head_between_them_have_the_same():
    rows = [
        part_of("model.layers.0.self_attn.k_proj.weight", DENSE, Place.of(r, 4, 1))
        for r in range(4)
    ]
    assert rows == [(slice(0, 8),), (slice(0, 8),), (slice(8, 16),), (slice(8, 16),)]
    assert local_config(DENSE, Place.of(0, 4, 1)).num_key_value_heads == 1


def test_a_vocabulary_is_padded_so_that_ranks_divide_it():
    assert [padded_vocab(n) for n in (1, 64, 257, 50272)] == [64, 64, 320, 50304]
    rows = [part_of("lm_head.weight", DENSE, Place.of(rank, 4, 1))[0] for rank in range(4)]
    assert rows == [slice(0, 16), slice(16, 32), slice(32, 48), slice(48, 61)]


def test_rows_are_shared_with_the_first_ranks_taking_one_more():
    assert bounds(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert bounds(1, 3) == [slice(0, 1), slice(1, 1), slice(1, 1)]


# ------------------------------------------------------------------ context


def test_positions_go_round_the_ranks():
    lengths = np.array([0, 1, 4, 7])
    assert [num_local(lengths, rank, 3).tolist() for rank in range(3)] == [
        [0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 1, 2],
    ]  # fmt: skip
    assert sum(num_local(lengths, rank, 3) for rank in range(3)).tolist() == lengths.tolist()


def test_a_token_of_another_rank_is_written_to_the_null_block():
    batch = batch_of([[1, 2, 3, 4, 5, 6]], block_size=4)  # blocks 1 and 2
    mine = local_batch(batch, 1, 2)
    assert mine.block_size == 2
    assert mine.slot_mapping.tolist() == [0, 2, 0, 3, 0, 4]


@pytest.mark.parametrize("shift", [0.0, 800.0])
def test_merged_parts_are_the_attention_over_all_keys(shift):
    """Also where the scores are so large that their exponents alone would overflow."""
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(5, 2, 12)) + shift, rng.normal(size=(12, 8))
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    whole = weights @ values / weights.sum(axis=2)[..., None]
    outputs, lses = [], []
    for part in range(3):
        mine = scores[..., part::3]
        top = mine.max(axis=2)
        exponents = np.exp(mine - top[..., None])
        outputs.append(exponents @ values[part::3] / exponents.sum(axis=2)[..., None])
        lses.append(np.log(exponents.sum(axis=2)) + top)
    assert np.allclose(merge(np.stack(outputs), np.stack(lses)), whole, atol=1e-12)


def test_a_part_that_saw_no_key_counts_nothing():
    outputs = np.stack([np.full((1, 1, 2), 3.0), np.zeros((1, 1, 2))])
    lses = np.array([[[1.5]], [[-np.inf]]])
    assert merge(outputs, lses).tolist() == [[[3.0, 3.0]]]


def test_the_reference_attention_has_the_block_size_of_the_scheduler():
    """What the other tests compare with reads by the same tables."""
    batch = batch_of([[1, 2, 3]], block_size=4)
    cache = np.random.default_rng(0).normal(size=(2, 3, 4, 1, 8))
    query = np.random.default_rng(1).normal(size=(3, 2, 8))
    out = paged_attention_reference(query, cache, batch, 1.0)
    assert np.allclose(out[0], cache[1, 1, 0, 0])
