"""Which ranks work together: every rank's place in the grid of ranks, and its part of the layers.

Promises: the grid, the groups and the layer ranges are the real engine's. Mirrors
`vllm/distributed/parallel_state.py:1506` `initialize_model_parallel` and
`vllm/distributed/utils.py:95` `get_pp_indices`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mini_vllm.checks import whole

AXES = ("external", "dp", "pp", "pcp", "tp")
"""From the axis along which neighbouring ranks are furthest apart to the one where they touch."""


def rank_groups(
    world_size: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    prefill_context_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
) -> dict[str, list[list[int]]]:
    """The groups of ranks of each kind: "tp", "dcp", "pcp", "pp", "dp" and "ep".

    Ranks are laid out in a grid with the axes of `AXES`. A group of one kind is what is left when
    all other coordinates are fixed; experts are spread over everything but the pipeline, and the
    decode context over neighbours within a tensor-parallel group.

    Raises:
        ValueError: a size below 1, or sizes whose product does not divide `world_size`.
    """
    sizes = {
        "dp": whole("data_parallel_size", data_parallel_size, 1),
        "pp": whole("pipeline_parallel_size", pipeline_parallel_size, 1),
        "pcp": whole("prefill_context_parallel_size", prefill_context_parallel_size, 1),
        "tp": whole("tensor_parallel_size", tensor_parallel_size, 1),
    }
    dcp = whole("decode_context_parallel_size", decode_context_parallel_size, 1)
    product = int(np.prod(list(sizes.values())))
    if whole("world_size", world_size, 1) % product:
        raise ValueError(
            f"world_size={world_size}: need a multiple of {product}, all sizes' product"
        )
    if sizes["tp"] % dcp:
        raise ValueError(f"decode_context_parallel_size={dcp}: need a divisor of {sizes['tp']}")
    grid = np.arange(world_size).reshape(-1, *sizes.values())

    def along(*axes: str) -> list[list[int]]:
        places = [AXES.index(axis) for axis in axes]
        others = [place for place in range(len(AXES)) if place not in places]
        size = int(np.prod([grid.shape[place] for place in places]))
        return grid.transpose(*others, *places).reshape(-1, size).tolist()

    groups = {kind: along(kind) for kind in ("tp", "pp", "pcp", "dp")}
    groups["ep"] = along("dp", "pcp", "tp")
    groups["dcp"] = grid.reshape(-1, dcp).tolist()
    return groups


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> range:
    """The layers of stage `pp_rank`: as even as can be, the last stage never with one more.

    Of a remainder the second-last stage takes one, then the one before it, and so on: the last
    stage has the norm and the head besides. `vllm/distributed/utils.py:95` `get_pp_indices`.

    Raises:
        ValueError: fewer layers than stages, or a stage out of range.
    """
    whole("pp_size", pp_size, 1)
    whole("pp_rank", pp_rank, 0, pp_size - 1)
    whole("num_hidden_layers", num_hidden_layers, pp_size)
    short, left_over = divmod(num_hidden_layers, pp_size)
    sizes = [short] * pp_size
    for stage in range(left_over):
        sizes[-2 - stage] += 1
    start = sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])


def experts_of(num_experts: int, ep_rank: int, ep_size: int) -> range:
    """The experts that a rank holds, whole: as even as can be, the first ranks with one more.

    As `vllm/model_executor/layers/fused_moe/expert_map_manager.py:22` `determine_expert_map` with
    its default, linear placement.
    """
    short, left_over = divmod(num_experts, ep_size)
    start = ep_rank * short + min(ep_rank, left_over)
    return range(start, start + short + (ep_rank < left_over))


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates."""

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dcp_size: int = 1
    expert_parallel: bool = False

    @classmethod
    def of(
        cls, rank: int, tp_size: int, pp_size: int, dcp_size: int = 1, expert_parallel: bool = False
    ) -> Place:
        """Tensor-parallel ranks of one stage are neighbours."""
        pp_rank, tp_rank = divmod(rank, tp_size)
        return cls(rank, tp_rank, tp_size, pp_rank, pp_size, dcp_size, expert_parallel)

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.pp_rank == self.pp_size - 1

    def layers(self, num_hidden_layers: int) -> range:
        """The layers of its stage."""
        return get_pp_indices(num_hidden_layers, self.pp_rank, self.pp_size)

    @property
    def dcp_rank(self) -> int:
        """Its place among the ranks that share a sequence's K and V."""
        return self.tp_rank % self.dcp_size

    def group(self, kind: str) -> list[int]:
        """The ranks that it works with: "tp", "pp" or "dcp"."""
        world = self.tp_size * self.pp_size
        groups = rank_groups(
            world, self.tp_size, self.pp_size, decode_context_parallel_size=self.dcp_size
        )
        return next(group for group in groups[kind] if self.rank in group)
