"""Lab 07-04: measure how uneven experts are loaded, and place copies of them on ranks.

`expert_loads`, `imbalance`, `ep_step_time`, `dropped_tokens`, `ep_step_time_roofline`,
`expert_map`, `replicate_experts`, `balanced_packing` and `rebalance` are the lab. The last four
answer as vLLM's own functions do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def expert_loads(topk_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """How many (token, expert) pairs each expert has.

    Args:
        topk_ids: int [num_tokens, k]; a token that names an expert twice counts twice.

    Returns:
        int64 [num_experts], experts that nobody chose included.

    Raises:
        ValueError: an id that is no expert's.
    """
    flat = np.asarray(topk_ids, dtype=np.int64).reshape(-1)
    if flat.size and not 0 <= flat.min() <= flat.max() < num_experts:
        raise ValueError(f"topk_ids from {flat.min()} to {flat.max()}: need 0 to {num_experts - 1}")
    return np.bincount(flat, minlength=num_experts)


def imbalance(loads: Sequence[int] | np.ndarray) -> float:
    """The largest load over the mean of all experts'; 1.0 is even, and what no load at all is."""
    loads = np.asarray(loads)
    return float(loads.max() / loads.mean()) if loads.sum() else 1.0


def ep_step_time(
    loads: Sequence[int] | np.ndarray, num_ranks: int, rank_of: Sequence[int] | None = None
) -> int:
    """Pairs that the busiest rank computes: the others wait for it.

    Args:
        loads: [num_experts].
        rank_of: the rank of each expert; by default vLLM's linear placement, where the first ranks
            have one expert more if they do not divide.

    Raises:
        ValueError: `num_ranks` below 1, or a rank in `rank_of` that does not exist.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: need at least 1")
    if rank_of is None:
        sizes = [len(part) for part in np.array_split(np.asarray(loads), num_ranks)]
        rank_of = np.repeat(np.arange(num_ranks), sizes).tolist()
    if len(rank_of) != len(loads) or min(rank_of) < 0 or max(rank_of) >= num_ranks:
        raise ValueError(f"rank_of={list(rank_of)}: need a rank below {num_ranks} for each expert")
    return int(np.bincount(rank_of, weights=loads, minlength=num_ranks).max())


def dropped_tokens(loads: Sequence[int] | np.ndarray, capacity_factor: float) -> int:
    """Pairs beyond capacity, as some training recipes drop them; vLLM never does.

    Every expert has the same capacity: `capacity_factor` times the mean load, rounded up.
    """
    loads = np.asarray(loads)
    capacity = math.ceil(capacity_factor * loads.sum() / len(loads))
    return int(np.maximum(loads - capacity, 0).sum())


def ep_step_time_roofline(loads: Sequence[int] | np.ndarray, num_ranks: int, ridge: float) -> float:
    """The busiest rank's time in units of reading one expert's weights, linear placement.

    A rank reads the weights of its experts that have any row, and computes its rows, `ridge` of
    which take as long as one expert's weights. The longer of the two is its time.

    A trace: loads [960, 92, 92, 92, 91, 91, 91, 91] on 8 ranks, ridge 156: 6.15; evenly 1.28.

    Args:
        ridge: rows an expert needs before computing takes longer than reading, above 0.
    """
    times = [
        max(np.count_nonzero(part), part.sum() / ridge)
        for part in np.array_split(np.asarray(loads), num_ranks)
    ]
    return float(max(times))


def expert_map(num_ranks: int, rank: int, num_experts: int, strategy: str) -> np.ndarray:
    """Where a rank keeps each expert: its local index, or -1 for an expert of another rank.

    "linear": each rank has a run of neighbouring experts. "round_robin": expert e is on rank e
    modulo `num_ranks`. Ranks that have one expert more than others are the first ones.

    Returns:
        int64 [num_experts].

    Raises:
        ValueError: a rank that does not exist, or another strategy.

    Source: `vllm/model_executor/layers/fused_moe/expert_map_manager.py:22`
    `determine_expert_map`.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank}: need 0 to {num_ranks - 1}")
    if strategy == "linear":
        mine = np.array_split(np.arange(num_experts), num_ranks)[rank]
    elif strategy == "round_robin":
        mine = np.arange(rank, num_experts, num_ranks)
    else:
        raise ValueError(f"strategy={strategy!r}: need 'linear' or 'round_robin'")
    found = np.full(num_experts, -1, dtype=np.int64)
    found[mine] = np.arange(len(mine))
    return found


def replicate_experts(
    loads: Sequence[float] | np.ndarray, num_physical: int
) -> tuple[np.ndarray, np.ndarray]:
    """Make copies of experts, one after the other, until there are `num_physical`.

    Each further copy is of the expert with the most load for each of its copies; of equal ones,
    the lower id. The originals come first, in order; then the copies, in the order they were made.

    A trace: loads [960, 92, 92, 92, 91, 91, 91, 91] and 10: experts 0 to 7, then 0, 0.

    Args:
        loads: [num_experts].
        num_physical: at least as many as experts.

    Returns:
        The expert of each physical one, int64 [num_physical], and the number of copies of each
        expert, int64 [num_experts].

    Raises:
        ValueError: `num_physical` is too small.

    Source: `vllm/distributed/eplb/policy/default.py:76` `DefaultEplbPolicy.replicate_experts`.
    """
    loads = np.asarray(loads, dtype=np.float64)
    if num_physical < len(loads):
        raise ValueError(f"num_physical={num_physical}: need at least {len(loads)}")
    counts = np.ones(len(loads), dtype=np.int64)
    logical = list(range(len(loads)))
    while len(logical) < num_physical:
        hottest = int(np.argmax(loads / counts))
        counts[hottest] += 1
        logical.append(hottest)
    return np.array(logical, dtype=np.int64), counts


def balanced_packing(
    loads: Sequence[float] | np.ndarray, num_packs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Put items into packs of equally many, the heaviest first, each into the lightest pack.

    Of equally heavy items the lower index comes first, of equally light packs the lower number. A
    full pack takes no more. With one item a pack, item i goes into pack i.

    A trace: [300, 280, 40, 30, 60, 50, 20, 10] in 4 packs: packs 0 1 3 2 2 3 1 0.

    Args:
        loads: [num_items].
        num_packs: divides the number of items.

    Returns:
        Each item's pack, and its place in the pack by order of arrival; both int64 [num_items].

    Raises:
        ValueError: `num_packs` does not divide.

    Source: `vllm/distributed/eplb/policy/default.py:23` `DefaultEplbPolicy.balanced_packing`.
    """
    loads = np.asarray(loads, dtype=np.float64)
    if num_packs < 1 or len(loads) % num_packs:
        raise ValueError(f"num_packs={num_packs}: need a divisor of {len(loads)}")
    room = len(loads) // num_packs
    if room == 1:
        return np.arange(num_packs), np.zeros(num_packs, dtype=np.int64)
    packs = np.zeros(len(loads), dtype=np.int64)
    places = np.zeros(len(loads), dtype=np.int64)
    weight, held = np.zeros(num_packs), np.zeros(num_packs, dtype=np.int64)
    for item in np.argsort(-loads, kind="stable"):
        pack = int(np.argmin(np.where(held < room, weight, np.inf)))
        packs[item], places[item] = pack, held[pack]
        weight[pack] += loads[item]
        held[pack] += 1
    return packs, places


def rebalance(loads: Sequence[float] | np.ndarray, num_physical: int, num_ranks: int) -> np.ndarray:
    """Which expert lies in each slot: copies of the hot ones, packed onto the ranks.

    The copies of an expert share its load evenly. A rank's slots are neighbours: rank r has slots
    r * s to (r + 1) * s - 1, with s = num_physical / num_ranks.

    Args:
        loads: [num_experts].
        num_physical: slots, at least as many as experts, a multiple of `num_ranks`.

    Returns:
        int64 [num_physical], the expert of each slot.

    Raises:
        ValueError: as `replicate_experts` and `balanced_packing`.

    Source: `vllm/distributed/eplb/policy/default.py:275` `DefaultEplbPolicy.rebalance_experts`,
    for one group and one node.
    """
    loads = np.asarray(loads, dtype=np.float64)
    logical, counts = replicate_experts(loads, num_physical)
    packs, places = balanced_packing((loads / counts)[logical], num_ranks)
    slots = np.empty(num_physical, dtype=np.int64)
    slots[packs * (num_physical // num_ranks) + places] = logical
    return slots
