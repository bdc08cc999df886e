"""What lab 11-03 pins: sizes, slots and fleets from the constants of an architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import mini_vllm
from labkit import refused, same
from mini_vllm.lora.config import LoRAConfig

MIB, GIB = 2**20, 2**30
ATTENTION = [(4096, 4096)] * 4
LLAMA2 = [*ATTENTION, (4096, 11008), (4096, 11008), (11008, 4096)]
LLAMA3 = [
    (4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096),
    (4096, 14336), (4096, 14336), (14336, 4096),
]  # fmt: skip
QWEN3 = [
    (1024, 2048), (1024, 1024), (1024, 1024), (2048, 1024),
    (1024, 3072), (1024, 3072), (3072, 1024),
]  # fmt: skip
LLAMA2_PARAMS = 6_738_415_616
ADAPTERS = Path(mini_vllm.__file__).parents[1] / "models" / "adapters"


def near(got, expected, why, atol):
    right = isinstance(got, int | float) and abs(got - expected) <= atol
    assert right, f"{why}\nexpected {expected} within {atol:g}\ncame     {got}"


def whole(got, expected, why):
    same(got, expected, why)
    assert type(got) is int, f"{why}: bytes and counts are whole\nexpected int\ncame     {got!r}"


# --- one adapter ----------------------------------------------------------------------------------


def test_per_layer_params(lab):
    for shape, rank, expected in (
        ((4096, 4096), 16, 131_072),
        ((4096, 11008), 16, 241_664),
        ((4096, 1024), 8, 40_960),
        ((5, 7), 1, 12),
    ):
        whole(
            lab.lora_params_per_layer(*shape, rank),
            expected,
            f"in, out = {shape}, rank {rank}: A has r x in, B has out x r",
        )


def test_adapter_is_32_mib(lab):
    whole(
        lab.adapter_bytes(4096, 32, 16),
        32 * MIB,
        "hidden 4096, 32 layers, rank 16, four matrices, two bytes: 32 MiB",
    )
    whole(lab.adapter_bytes(4096, 32, 16, 1, 4), 16 * MIB, "one matrix a layer, four bytes")


def test_rank_is_a_linear_dial(lab):
    for rank, expected in ((1, 2), (8, 16), (64, 128), (256, 512)):
        whole(lab.adapter_bytes(4096, 32, rank), expected * MIB, f"the same at rank {rank}, in MiB")


def test_adapters_per_gib(lab):
    for size, expected in ((32 * MIB, 32), (GIB, 1), (GIB + 1, 0), (3 * MIB, 341)):
        whole(lab.adapters_per_gib(size), expected, f"whole adapters of {size:,} bytes in 2**30")


def test_shrink_ratio_is_the_headline(lab, record_property):
    near(
        lab.shrink_ratio(LLAMA2_PARAMS, 4096, 32, 16),
        401.64,
        "Llama-2-7B over an adapter of rank 16 on q, k, v, o: parameters over parameters",
        0.01,
    )
    near(lab.shrink_ratio(7_000_000_000, 4096, 32, 16), 417.23, "a round 7e9", 0.01)
    near(
        lab.shrink_ratio(LLAMA2_PARAMS, 4096, 32, 16, 2),
        803.28,
        "an adapter of two matrices in each layer: half as large",
        0.01,
    )
    record_property("measured.shrink", lab.shrink_ratio(LLAMA2_PARAMS, 4096, 32, 16))


def test_delta_flops_are_a_share_of_the_base(lab):
    for shape, rank, expected in (
        ((4096, 4096), 16, 1 / 128),
        ((4096, 4096), 64, 1 / 32),
        ((4096, 11008), 16, 16 * 15104 / (4096 * 11008)),
    ):
        near(lab.delta_flop_ratio(*shape, rank), expected, f"{shape}, rank {rank}", 1e-12)


@pytest.mark.parametrize("name", ["shout", "quote", "code"])
def test_the_shipped_adapters_have_these_sizes(lab, name):
    folder = ADAPTERS / name
    rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    total = 0
    for key, a in tensors.items():
        if ".lora_A." in key:
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            total += lab.lora_params_per_layer(a.shape[1], b.shape[0], rank)
    same(
        total,
        sum(tensor.size for tensor in tensors.values()),
        f"the adapter {name}, rank {rank}: your sum over its matrices, and the numbers in its file",
    )


# --- slots ----------------------------------------------------------------------------------------


def test_a_slot_has_room_for_every_wrapped_matrix(lab, record_property):
    for modules, slots, rank, expected, what in (
        (LLAMA2, 1, 16, 76.25, "Llama-2-7B"),
        (LLAMA2, 2, 16, 152.5, "Llama-2-7B"),
        (ATTENTION, 2, 16, 64, "Llama-2-7B, attention only"),
        (LLAMA2, 8, 16, 610, "Llama-2-7B"),
        (LLAMA2, 32, 64, 9760, "Llama-2-7B"),
        (ATTENTION, 32, 64, 4096, "Llama-2-7B, attention only"),
        (LLAMA3, 1, 16, 80, "Llama-3-8B, whose k and v are narrower"),
    ):
        whole(
            lab.slot_reservation_bytes(slots, rank, modules, 32),
            int(expected * MIB),
            f"{what}: {slots} slots of rank {rank}, {expected} MiB",
        )
    whole(
        lab.slot_reservation_bytes(1, 8, QWEN3, 28),
        int(9.625 * MIB),
        "Qwen3-0.6B: one slot of rank 8, 9.625 MiB",
    )
    whole(
        lab.slot_reservation_bytes(1, 8, QWEN3, 28, 4),
        int(19.25 * MIB),
        "and in float32, four bytes a number",
    )
    record_property("measured.reserved", lab.slot_reservation_bytes(32, 64, LLAMA2, 32) / GIB)


def test_a_reservation_is_no_adapter(lab):
    adapter = lab.adapter_bytes(4096, 32, 8)
    for rank in (8, 16, 64):
        slot = lab.slot_reservation_bytes(1, rank, LLAMA2, 32)
        assert slot > adapter, (
            "an adapter of rank 8 on q, k, v, o in an engine that wraps all seven matrices at "
            f"rank {rank}: the slot is larger, whatever is in it\n"
            f"expected more than {adapter:,}\ncame     {slot:,}"
        )


def test_only_some_ranks_are_allowed(lab):
    for ranks, expected in (
        ([1], 1), ([2], 8), ([8, 24], 32), ([16], 16), ([257], 320), ([512, 8], 512)
    ):  # fmt: skip
        whole(
            lab.max_lora_rank_for(ranks),
            expected,
            f"adapters of ranks {ranks}: the smallest of {lab.ALLOWED_RANKS} that holds them",
        )
    for rank in range(1, 513):
        knob = lab.max_lora_rank_for([rank])
        try:
            LoRAConfig(max_lora_rank=knob)
        except ValueError as error:
            raise AssertionError(f"rank {rank}: {knob} is refused by an engine: {error}") from None
    for ranks in ([], [513], [8, 0], [-1]):
        refused(lambda ranks=ranks: lab.max_lora_rank_for(ranks), f"ranks {ranks}")


def test_padding_is_paid_for(lab, record_property):
    for ranks, expected in (
        ([8, 16, 64], 104 / 192), ([16, 16], 0.0), ([24], 0.25), ([8] * 9 + [512], 0.8859375)
    ):  # fmt: skip
        near(
            lab.padding_waste(ranks),
            expected,
            f"adapters of ranks {ranks} in slots of one size: the share that stays zero",
            1e-9,
        )
    record_property("measured.waste", 100 * lab.padding_waste([8, 16, 64]))


def test_slots_take_kv_blocks(lab):
    reserved = lab.slot_reservation_bytes(32, 64, LLAMA2, 32)
    whole(
        lab.kv_blocks_lost(reserved, MIB // 2),
        1220,
        "Llama-2-7B, (32, 64): 9.53 GiB, and a block of 16 tokens takes 8 MiB: 19,520 tokens fewer",
    )
    whole(
        lab.kv_blocks_lost(lab.slot_reservation_bytes(32, 64, ATTENTION, 32), MIB // 2),
        512,
        "with attention alone wrapped",
    )
    whole(lab.kv_blocks_lost(8 * MIB + 1, MIB // 2), 2, "one byte of a block takes the block")
    whole(lab.kv_blocks_lost(8 * MIB, MIB, 4), 2, "blocks of 4 tokens of 1 MiB")


# --- a step and a fleet ---------------------------------------------------------------------------


def test_a_step_reads_each_adapter_once(lab):
    base = 2 * LLAMA2_PARAMS
    for count, rank, expected in (
        (0, 16, 0.0), (1, 16, 0.0059), (8, 16, 0.0475), (32, 16, 0.1898), (32, 64, 0.7594)
    ):  # fmt: skip
        slot = lab.slot_reservation_bytes(1, rank, LLAMA2, 32)
        near(
            lab.step_traffic_ratio(base, count, slot),
            expected,
            f"Llama-2-7B, {count} adapters of rank {rank} on all matrices in one decode step",
            1e-4,
        )


def test_gpus_saved(lab, record_property):
    for tenants, slots, expected in (
        (100, 8, 87), (9, 8, 7), (8, 8, 7), (1, 8, 0), (1, 1, 0), (5, 1, 0), (17, 16, 15)
    ):  # fmt: skip
        whole(
            lab.gpus_saved(tenants, slots),
            expected,
            f"{tenants} tenants, {slots} to an engine: a last engine may be nearly empty",
        )
    record_property("measured.engines", 100 - lab.gpus_saved(100, 8))


def test_nothing_is_not_an_amount(lab):
    for call, what in (
        (lambda: lab.lora_params_per_layer(0, 4, 1), "in_features=0"),
        (lambda: lab.lora_params_per_layer(4, 4, -1), "rank=-1"),
        (lambda: lab.adapter_bytes(4, 0, 1), "num_layers=0"),
        (lambda: lab.adapter_bytes(4, 1, 1, 0), "targets_per_layer=0"),
        (lambda: lab.adapters_per_gib(0), "adapter_nbytes=0"),
        (lambda: lab.shrink_ratio(0, 4, 1, 1), "base_params=0"),
        (lambda: lab.delta_flop_ratio(4, 0, 1), "out_features=0"),
        (lambda: lab.slot_reservation_bytes(0, 8, [(4, 4)], 1), "max_loras=0"),
        (lambda: lab.slot_reservation_bytes(1, 8, [], 1), "no modules"),
        (lambda: lab.slot_reservation_bytes(1, 0, [(4, 4)], 1), "max_lora_rank=0"),
        (lambda: lab.kv_blocks_lost(0, 1), "reserved_bytes=0"),
        (lambda: lab.step_traffic_ratio(1, -1, 1), "n_distinct=-1"),
        (lambda: lab.step_traffic_ratio(0, 1, 1), "base_bytes=0"),
        (lambda: lab.gpus_saved(0, 8), "num_tenants=0"),
        (lambda: lab.gpus_saved(3, 0), "max_loras=0"),
    ):
        refused(call, what)
