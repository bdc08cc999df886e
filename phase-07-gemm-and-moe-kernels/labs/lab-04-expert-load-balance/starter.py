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
    raise NotImplementedError


def imbalance(loads: Sequence[int] | np.ndarray) -> float:
    """The largest load over the mean of all experts'; 1.0 is even, and what no load at all is."""
    raise NotImplementedError


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
    raise NotImplementedError


def dropped_tokens(loads: Sequence[int] | np.ndarray, capacity_factor: float) -> int:
    """Pairs beyond capacity, as some training recipes drop them; vLLM never does.

    Every expert has the same capacity: `capacity_factor` times the mean load, rounded up.
    """
    raise NotImplementedError


def ep_step_time_roofline(loads: Sequence[int] | np.ndarray, num_ranks: int, ridge: float) -> float:
    """The busiest rank's time in units of reading one expert's weights, linear placement.

    A rank reads the weights of its experts that have any row, and computes its rows, `ridge` of
    which take as long as one expert's weights. The longer of the two is its time.

    A trace: loads [960, 92, 92, 92, 91, 91, 91, 91] on 8 ranks, ridge 156: 6.15; evenly 1.28.

    Args:
        ridge: rows an expert needs before computing takes longer than reading, above 0.
    """
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError
