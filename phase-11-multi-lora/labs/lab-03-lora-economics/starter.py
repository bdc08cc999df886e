"""Lab 11-03: what adapters cost, on disk, in slots, in a step and in machines.

An adapter of rank r adds, for each matrix it changes, A [r, in] and B [out, r]. A *slot* is what an
engine reserves for any adapter: room for every matrix it has wrapped, at the largest rank it
allows, whoever comes. MiB is 2**20 bytes, GiB 2**30.

Sources: `vllm/lora/layers/base_linear.py:99` `BaseLinearLayerWithLoRA.create_lora_weights`,
`vllm/config/lora.py:34` `LoRAConfig.max_lora_rank`.
"""

from __future__ import annotations

from collections.abc import Sequence

ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `max_lora_rank` may be: `vllm/config/lora.py:26` `MaxLoRARanks` (given)."""

Shape = tuple[int, int]
"""A matrix by its in and out features."""


def _need(**values: float) -> None:
    """Raises ValueError for the first that is not above 0 (given)."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")


# --- one adapter ----------------------------------------------------------------------------------


def lora_params_per_layer(in_features: int, out_features: int, rank: int) -> int:
    """Parameters that an adapter adds to one matrix.

    A trace: 4096 x 4096 at rank 16: 131,072, where the matrix has 16,777,216.

    Raises:
        ValueError: an argument is not above 0.
    """
    raise NotImplementedError


def adapter_bytes(
    hidden: int, num_layers: int, rank: int, targets_per_layer: int = 4, dtype_bytes: int = 2
) -> int:
    """Bytes of an adapter of square matrices, `hidden` x `hidden`.

    A trace: hidden 4096, 32 layers, rank 16, q, k, v and o in bf16: 33,554,432 bytes, 32 MiB.

    Raises:
        ValueError: an argument is not above 0.
    """
    raise NotImplementedError


def adapters_per_gib(adapter_nbytes: int) -> int:
    """How many whole adapters of that size a GiB holds.

    Raises:
        ValueError: the size is not above 0.
    """
    raise NotImplementedError


def shrink_ratio(
    base_params: int, hidden: int, num_layers: int, rank: int, targets_per_layer: int = 4
) -> float:
    """How many times fewer parameters an adapter of square matrices has than its base.

    A trace: Llama-2-7B has 6,738,415,616; at rank 16 on q, k, v and o: 401.6 times.

    Raises:
        ValueError: an argument is not above 0.
    """
    raise NotImplementedError


def delta_flop_ratio(in_features: int, out_features: int, rank: int) -> float:
    """Multiplications of a row's delta over those of its base product.

    A trace: 4096 x 4096 at rank 16: 1/128, or 0.78 %.

    Raises:
        ValueError: an argument is not above 0.
    """
    raise NotImplementedError


# --- slots ----------------------------------------------------------------------------------------


def max_lora_rank_for(ranks: Sequence[int]) -> int:
    """The smallest `max_lora_rank` an engine may be started with to serve adapters of `ranks`.

    A trace: ranks 8 and 24 need 32.

    Raises:
        ValueError: no ranks, one that is not above 0, or one above 512.
    """
    raise NotImplementedError


def padding_waste(ranks: Sequence[int]) -> float:
    """Share of their slots that adapters of `ranks` leave empty, one slot each, in [0, 1).

    A trace: ranks 8, 16 and 64: 54.2 %.

    Raises:
        ValueError: as `max_lora_rank_for`.
    """
    raise NotImplementedError


def slot_reservation_bytes(
    max_loras: int,
    max_lora_rank: int,
    modules: Sequence[Shape],
    num_layers: int,
    dtype_bytes: int = 2,
) -> int:
    """Bytes that an engine takes at start-up for all its slots.

    A trace: Llama-2-7B, all seven matrices of each of 32 layers wrapped, 2 slots of rank 16:
    152.5 MiB; with q, k, v and o alone 64 MiB.

    Args:
        max_loras: slots.
        max_lora_rank: rank each slot has room for.
        modules: every matrix of a layer that is wrapped, whether an adapter changes it or not.
        num_layers: of them.
        dtype_bytes: bytes of a number.

    Raises:
        ValueError: no modules, or a number that is not above 0.
    """
    raise NotImplementedError


def kv_blocks_lost(reserved_bytes: int, kv_bytes_per_token: int, block_size: int = 16) -> int:
    """Whole KV blocks that no longer fit beside a reservation.

    A trace: 9.53125 GiB where a token takes 0.5 MiB: 1,220 blocks of 16 tokens.

    Raises:
        ValueError: an argument is not above 0.
    """
    raise NotImplementedError


# --- a step and a fleet ---------------------------------------------------------------------------


def step_traffic_ratio(base_bytes: float, n_distinct: int, slot_bytes: float) -> float:
    """Bytes of adapters a decode step reads, over those of the base, which it reads once.

    A trace: Llama-2-7B (13,476,831,232 bytes), 8 adapters in the step, 76.25 MiB each: 4.7 %.

    Args:
        base_bytes: weights of the base.
        n_distinct: different adapters in the step, 0 or more; how many rows each has is no matter.
        slot_bytes: of one of them.

    Raises:
        ValueError: sizes that are not above 0, or a negative number of adapters.
    """
    raise NotImplementedError


def gpus_saved(num_tenants: int, max_loras: int) -> int:
    """Engines that are not needed when tenants share them, `max_loras` to each.

    A trace: 100 tenants on 8 slots: 13 engines in place of 100, so 87.

    Raises:
        ValueError: an argument is not above 0.
    """
    raise NotImplementedError
