"""Record how the pinned tree routes, aligns, places and balances experts.

Needs the pinned tree on `PYTHONPATH`, no GPU. Cases carry a `kind`; what one holds is said by the
function that records it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from conformance.features.quantization.quantization_layouts import floats

Case = dict[str, Any]
ALIGN_TEST = Path("tests", "kernels", "moe", "test_moe_align_block_size.py")

ABOUT = (
    "Kinds: route (logits to ids and weights), align (ids to padded blocks), expert_map (experts "
    "of a rank), packing, replicas and rebalance (the load balancer's policy)."
)


def route() -> Iterator[Case]:
    """`{"logits", "top_k", "renormalize", "ids", "weights"}`: float32, ids in falling order.

    `vllm/model_executor/layers/fused_moe/cpu_fused_moe.py:117` `select_experts`, the router of
    processors, which promises no order: it is sorted here by weight. No two logits are equal.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    rng = np.random.default_rng(0)
    for num_tokens, num_experts, top_k in ((5, 4, 2), (7, 8, 2), (9, 16, 1), (6, 60, 4), (3, 8, 8)):
        for renormalize in (True, False):
            scale = np.float32(3.0)
            logits = rng.standard_normal((num_tokens, num_experts), dtype=np.float32) * scale
            weights, ids = select_experts(
                torch.zeros(num_tokens, 1), torch.from_numpy(logits), top_k, False, renormalize
            )
            falling = torch.argsort(weights, dim=1, descending=True)
            yield {
                "kind": "route",
                "logits": floats(logits),
                "top_k": top_k,
                "renormalize": renormalize,
                "ids": ids.gather(1, falling).tolist(),
                "weights": floats(weights.gather(1, falling).numpy()),
            }


def align() -> Iterator[Case]:
    """`{"topk_ids", "block_size", "num_experts", "sorted_ids", "expert_ids", "num_padded"}`.

    The reference that upstream's kernel is tested against, in the pinned tree's own
    `tests/kernels/moe`; it fills what it does not use with the number of pairs and with -1.
    """
    import torch

    reference = _align_test().torch_moe_align_block_size
    rng = np.random.default_rng(1)
    worked = np.array([[0, 1], [2, 3], [1, 3], [3, 0]])
    docstring = np.array([[1, 2, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2]])
    asked = [
        (worked, 4, 4),
        (docstring, 4, 4),
        (np.array([[5]]), 16, 8),
        (np.array([[0, 7]]), 4, 64),
    ]
    for num_tokens, top_k, num_experts, block_size in (
        (1, 2, 16, 16), (3, 2, 8, 4), (32, 8, 64, 16), (64, 2, 16, 8), (17, 4, 60, 32),
        (9, 1, 3, 1),
    ):  # fmt: skip
        ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)])
        asked.append((ids, block_size, num_experts))
    for ids, block_size, num_experts in asked:
        topk_ids = torch.from_numpy(ids.astype(np.int32))
        sorted_ids, expert_ids, num_padded = reference(topk_ids, block_size, num_experts)
        yield {
            "kind": "align",
            "topk_ids": ids.tolist(),
            "block_size": block_size,
            "num_experts": num_experts,
            "sorted_ids": sorted_ids.tolist(),
            "expert_ids": expert_ids.tolist(),
            "num_padded": int(num_padded),
        }


def _align_test() -> ModuleType:
    """The pinned tree's test module; its folder is no package that can be imported by name."""
    import vllm

    path = Path(str(vllm.__file__)).parents[1] / ALIGN_TEST
    spec = importlib.util.spec_from_file_location("pinned_align_test", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    with mock.patch("vllm.utils.torch_utils.set_random_seed"):  # it asks the platform, here none
        spec.loader.exec_module(module)
    return module


def expert_map() -> Iterator[Case]:
    """`{"num_ranks", "rank", "num_experts", "strategy", "num_local", "map"}`; map None: all local.

    `vllm/model_executor/layers/fused_moe/expert_map_manager.py:22` `determine_expert_map`
    """
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for num_experts, num_ranks in ((8, 1), (8, 2), (16, 4), (10, 4), (7, 3), (3, 4), (64, 8)):
        for strategy in ("linear", "round_robin"):
            for rank in range(num_ranks):
                local, mapped, _ = determine_expert_map(num_ranks, rank, num_experts, strategy)
                yield {
                    "kind": "expert_map",
                    "num_ranks": num_ranks,
                    "rank": rank,
                    "num_experts": num_experts,
                    "strategy": strategy,
                    "num_local": local,
                    "map": None if mapped is None else mapped.tolist(),
                }


def loads() -> list[list[list[int]]]:
    """Loads [layers][experts] to balance: worked ones, skewed ones, and ties among few experts."""
    rng = np.random.default_rng(2)
    hot = [[960, 92, 93, 94, 91, 90, 89, 88]]
    worked = [[300, 280, 40, 30, 60, 50, 20, 10]]
    zipf = [rng.permutation(1_000_000 // np.arange(1, 17) ** 2).tolist() for _ in range(4)]
    even = rng.permutation(np.arange(100, 164))[None].tolist()
    return [hot, worked, zipf, even, rng.integers(1, 10**6, (3, 32)).tolist()]


def packing() -> Iterator[Case]:
    """`{"loads", "num_packs", "pack_index", "rank_in_pack"}`, all but num_packs [layers][items].

    `vllm/distributed/eplb/policy/default.py:23` `DefaultEplbPolicy.balanced_packing`, with a sort
    that is stable: upstream leaves the order of equal loads to numpy.
    """
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    for weight in loads():
        for num_packs in (1, 2, 4, 8):
            with stable_sort():
                weights = np.array(weight, float)
                packs, ranks = DefaultEplbPolicy.balanced_packing(weights, num_packs)
            yield {
                "kind": "packing",
                "loads": weight,
                "num_packs": num_packs,
                "pack_index": packs.tolist(),
                "rank_in_pack": ranks.tolist(),
            }


def stable_sort() -> AbstractContextManager[Any]:
    """numpy's argsort, stable whatever the caller asked for."""
    return mock.patch.object(np, "argsort", functools.partial(np.argsort, kind="stable"))


def replicas() -> Iterator[Case]:
    """`{"loads", "num_physical", "physical_to_logical", "num_replicas"}`.

    `vllm/distributed/eplb/policy/default.py:76` `DefaultEplbPolicy.replicate_experts`
    """
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    for weight in loads():
        for more in (0, 1, 4, 8, 24):
            num_physical = len(weight[0]) + more
            physical, counts = DefaultEplbPolicy.replicate_experts(
                np.array(weight, float), num_physical
            )
            yield {
                "kind": "replicas",
                "loads": weight,
                "num_physical": num_physical,
                "physical_to_logical": physical.tolist(),
                "num_replicas": counts.tolist(),
            }


def rebalance() -> Iterator[Case]:
    """`{"loads", "num_physical", "num_ranks", "physical_to_logical"}`, one group and one node.

    `vllm/distributed/eplb/policy/default.py:275` `DefaultEplbPolicy.rebalance_experts`, the sort
    stable as for "packing": replicas of one expert have equal loads.
    """
    import torch
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    for weight in loads():
        for more, num_ranks in ((0, 2), (0, 4), (4, 4), (8, 4), (8, 8)):
            num_physical = len(weight[0]) + more
            with stable_sort():
                found = DefaultEplbPolicy.rebalance_experts(
                    torch.tensor(weight, dtype=torch.float32), num_physical, 1, 1, num_ranks
                )
            yield {
                "kind": "rebalance",
                "loads": weight,
                "num_physical": num_physical,
                "num_ranks": num_ranks,
                "physical_to_logical": found.tolist(),
            }


RECORDS = (route, align, expert_map, packing, replicas, rebalance)


def cases() -> Iterator[Case]:
    """Every case of every kind, the same ones each time."""
    for record in RECORDS:
        yield from record()
