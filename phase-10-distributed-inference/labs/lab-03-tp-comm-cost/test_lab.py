"""What lab 10-03 pins: a ring that is counted, a bill that follows, the real choice of a kernel."""

from __future__ import annotations

import math

import numpy as np

from conformance import parts
from labkit import refused, same

NVLINK, PCIE, IB, ETHERNET = (300e9, 3e-6), (25e9, 10e-6), (25e9, 5e-6), (1.25e9, 50e-6)
MODEL_8B = (32, 1, 4096)  # layers, tokens, hidden
PREFILL = (32, 2048, 4096)


def near(got, expected, why, digits=4):
    """Equal to so many significant digits."""
    assert isinstance(got, int | float) and math.isclose(
        got, expected, rel_tol=0.5 * 10**-digits
    ), f"{why}\nexpected {expected:.6g}\ncame     {got!r}"


# --- the payload and the ring ---------------------------------------------------------------------


def test_payload_is_one_activation_row_per_token(lab):
    same(lab.allreduce_payload_bytes(1, 4096), 8192, "one token of 4,096 in 2 bytes")
    same(lab.allreduce_payload_bytes(2048, 4096), 16_777_216, "2,048 tokens: 16 MiB")
    same(lab.allreduce_payload_bytes(3, 100, 4), 1200, "3 tokens of 100 in 4 bytes")
    same(lab.allreduce_payload_bytes(0, 4096), 0, "no token")


def test_ring_worked_example(lab):
    ring = lab.Ring(2)
    parts = [np.array([1, 2], np.int64), np.array([10, 20], np.int64)]
    came = lab.ring_all_reduce(parts, ring)
    same([part.tolist() for part in came], [[11, 22], [11, 22]], "what both ranks have in the end")
    same((ring.steps, ring.sent), (2, [16, 16]), "steps, and bytes sent by rank (8 a number)")


def test_a_simulated_ring_adds_up(lab):
    rng = np.random.default_rng(1)
    for world in (1, 2, 3, 4, 8):
        given = [rng.integers(-9, 10, 24).astype(np.float64) for _ in range(world)]
        before = [part.copy() for part in given]
        came = lab.ring_all_reduce(given, lab.Ring(world))
        expected = np.sum(before, axis=0).tolist()
        for rank, part in enumerate(came):
            same(
                part.tolist(), expected, f"{world} ranks, 24 numbers: the sum that rank {rank} has"
            )
        same(
            [part.tolist() for part in given], [part.tolist() for part in before],
            f"{world} ranks: the arrays that were handed in",
        )  # fmt: skip
        came[0][:] = -1
        assert all(part.tolist() == expected for part in came[1:]), (
            f"{world} ranks: expected an array of its own for each rank; came shared memory"
        )


def test_the_ring_costs_what_the_formula_says(lab, record_property):
    for world in (1, 2, 3, 4, 8):
        for length in (24, 240):
            ring = lab.Ring(world)
            lab.ring_all_reduce([np.ones(length) for _ in range(world)], ring)
            traffic = lab.ring_allreduce_traffic_per_rank(8 * length, world)
            same(
                (ring.steps, ring.sent), (2 * (world - 1), [round(traffic)] * world),
                f"{world} ranks, {8 * length} bytes: steps, and bytes that each rank sent (C2). A "
                "ring that passes whole arrays, or all chunks to one rank, moves more",
            )  # fmt: skip
        if world == 8:
            record_property("measured.ring_steps", ring.steps)


def test_ring_traffic_formula(lab):
    for world, expected in ((1, 0.0), (2, 1000.0), (4, 1500.0), (8, 1750.0)):
        same(
            lab.ring_allreduce_traffic_per_rank(1000, world), expected,
            f"1,000 bytes, {world} ranks: once (N - 1) / N to add up, once to hand round",
        )  # fmt: skip
    near(lab.ring_allreduce_traffic_per_rank(1000, 10**6), 2000, "a million ranks: 2 S at most")


# --- the bill -------------------------------------------------------------------------------------


def test_latency_dominates_small_payloads(lab):
    bandwidth, latency = NVLINK
    near(
        lab.allreduce_time_s(8192, 2, bandwidth, latency), 6.0273e-6, "8,192 bytes, 2 ranks, NVLink"
    )
    near(lab.allreduce_time_s(8192, 2, bandwidth, latency / 2), 3.0273e-6, "half the latency")
    near(lab.allreduce_time_s(8192, 2, 2 * bandwidth, latency), 6.01365e-6, "twice the bandwidth")
    near(
        lab.allreduce_time_s(8192, 8, bandwidth, latency), 14 * 3e-6 + 1.75 * 8192 / 300e9,
        "8 ranks: 14 hops, one after another (C3)",
    )  # fmt: skip


def test_prefill_payloads_shift_the_balance_to_bandwidth(lab):
    bandwidth, latency = NVLINK
    size = 16_777_216
    near(lab.allreduce_time_s(size, 2, bandwidth, latency), 61.924e-6, "16 MiB, 2 ranks, NVLink")
    near(lab.allreduce_time_s(size, 2, bandwidth, latency / 2), 58.924e-6, "half the latency")
    near(lab.allreduce_time_s(size, 2, 2 * bandwidth, latency), 33.962e-6, "twice the bandwidth")
    for link, expected in ((NVLINK, 3.963), (PCIE, 44.23), (IB, 43.59), (ETHERNET, 865.4)):
        came = 1000 * lab.tp_comm_time_per_step(*PREFILL, 2, *link)
        near(came, expected, f"2,048 tokens of an 8B, 2 ranks, {link}: milliseconds", 3)


def test_decode_step_comm_on_nvlink_is_noise(lab, record_property):
    time = lab.tp_comm_time_per_step(*MODEL_8B, 2, *NVLINK)
    near(1000 * time, 0.38575, "one token through 32 layers, 2 ranks, NVLink: milliseconds")
    near(lab.comm_fraction(time, 0.008), 0.046, "beside 8 ms of compute", 2)
    share = lab.comm_fraction(time, 0.004)
    near(share, 0.08796, "beside the 4 ms that two ranks have each: the smaller half counts", 3)
    record_property("measured.share", 100 * share)


def test_decode_step_comm_on_ethernet_is_fatal(lab):
    time = lab.tp_comm_time_per_step(*MODEL_8B, 2, *ETHERNET)
    near(1000 * time, 6.8194, "one token through 32 layers, 2 ranks, 10 GbE: milliseconds")
    near(lab.comm_fraction(time, 0.004), 0.63, "beside 4 ms of compute", 2)
    for link, expected in ((PCIE, 1.301), (IB, 0.661)):
        near(
            1000 * lab.tp_comm_time_per_step(*MODEL_8B, 2, *link),
            expected,
            f"the same on {link}",
            3,
        )


def test_more_ranks_more_overhead(lab):
    times = [1000 * lab.tp_comm_time_per_step(*MODEL_8B, n, *NVLINK) for n in (1, 2, 4, 8)]
    same(times[0], 0.0, "one rank sends nothing to nobody (C1)")
    for ranks, came, expected in zip((2, 4, 8), times[1:], (0.3857, 1.155, 2.691), strict=True):
        near(came, expected, f"an 8B's decode on a ring of {ranks} ranks of NVLink: ms", 3)
    grows = [
        lab.tp_comm_time_per_step(layers, tokens, 64, 4, 1e9, latency)
        for layers, tokens, latency in ((1, 1, 1e-6), (2, 1, 1e-6), (2, 5, 1e-6), (2, 5, 9e-6))
    ]
    same(grows, sorted(set(grows)), "more layers, more tokens, more latency: each takes longer")
    near(
        lab.tp_comm_time_per_step(80, 1, 8192, 2, *NVLINK) / 160,
        lab.allreduce_time_s(16384, 2, *NVLINK),
        "80 layers are 160 all-reduces: one after attention, one after the MLP",
    )
    near(
        lab.tp_comm_time_per_step(2, 3, 64, 4, *PCIE, 4, 1),
        2 * lab.allreduce_time_s(3 * 64 * 4, 4, *PCIE),
        "numbers of 4 bytes, one all-reduce a layer",
    )


def test_where_hops_and_bytes_cost_the_same(lab, record_property):
    for link, world, expected in ((NVLINK, 2, 1.8e6), (ETHERNET, 2, 125e3), (NVLINK, 8, 7.2e6)):
        size = lab.crossover_bytes(world, *link)
        near(size, expected, f"{world} ranks, {link}")
        time = lab.allreduce_time_s(size, world, *link)
        hops = lab.allreduce_time_s(0, world, *link)
        near(hops, time - hops, f"{world} ranks, {link}, {size:g} bytes: hops against bytes (C4)")
    record_property("measured.tokens", lab.crossover_bytes(2, *NVLINK) / 8192)


def test_comm_fraction_is_a_share(lab):
    for comm, compute, expected in ((1, 3, 0.25), (0, 0, 0.0), (0, 2, 0.0), (2, 0, 1.0)):
        same(
            lab.comm_fraction(comm, compute), expected, f"{comm} s beside {compute} s: of the whole"
        )


# --- other ways -----------------------------------------------------------------------------------


def test_reading_directly(lab):
    near(
        lab.direct_allreduce_time_s(8192, 8, *NVLINK, 1),
        6.19115e-6,
        "8 ranks, 8,192 bytes, one shot",
    )
    near(lab.direct_allreduce_time_s(8192, 8, *NVLINK, 2), 12.0478e-6, "the same in two shots")
    for world in (2, 3, 4, 8):
        ring = lab.allreduce_time_s(10**6, world, 1e9, 0.0)
        near(
            lab.direct_allreduce_time_s(10**6, world, 1e9, 0.0, 2), ring,
            f"{world} ranks: two shots move as much as a ring, in another number of steps",
        )  # fmt: skip
        near(
            lab.direct_allreduce_time_s(10**6, world, 1e9, 0.0, 1), ring * world / 2,
            f"{world} ranks: one shot moves N / 2 times as much",
        )  # fmt: skip
    for shots in (1, 2):
        same(
            lab.direct_allreduce_time_s(8192, 1, *NVLINK, shots), 0.0, "one rank reads nothing (C1)"
        )
    compute = 0.008
    best = [
        1000 * (compute / n + 64 * lab.direct_allreduce_time_s(8192, n, *NVLINK, 1))
        for n in (2, 4, 8)
    ]
    for came, expected in zip(best, (4.386, 2.389, 1.396), strict=True):
        near(came, expected, "8 ms of compute on 2, 4, 8 ranks and 64 one-shot all-reduces: ms", 3)


def test_when_one_shot_stops_paying(lab):
    same(lab.one_shot_limit_bytes(2, *NVLINK), math.inf, "2 ranks: one shot moves no more than two")
    for world, expected in ((4, 1.2e6), (6, 540e3), (8, 342_857)):
        size = lab.one_shot_limit_bytes(world, *NVLINK)
        near(size, expected, f"{world} ranks of NVLink")
        near(
            lab.direct_allreduce_time_s(size, world, *NVLINK, 1),
            lab.direct_allreduce_time_s(size, world, *NVLINK, 2),
            f"{world} ranks, {size:,.0f} bytes: one shot and two shots take as long",
        )


def test_the_real_choice_of_a_kernel(lab):
    found = {"one-shot": 0, "two-shot": 0, None: 0}
    for case in parts.load("all_reduce_choice"):
        expected = case["kernel"] if case["custom"] else None
        asked = (case["bytes"], case["world"], case["fully_connected"], case["max_size"])
        same(
            lab.custom_all_reduce(*asked), expected,
            f"{asked[0]:,} bytes, {asked[1]} ranks, {'' if asked[2] else 'not '}fully connected, "
            f"buffers of {asked[3]:,}: what vLLM does (C5)",
        )  # fmt: skip
        found[expected] += 1
    assert min(found.values()) >= 40, f"situations that were met: expected 40 of each; came {found}"
    for world in (1, 3, 5, 7, 16):
        same(lab.custom_all_reduce(8192, world, True), None, f"{world} ranks are not supported")


# --- experts --------------------------------------------------------------------------------------


def test_all_to_all_of_a_token(lab):
    for top_k, hidden, world, expected in (
        (2, 4096, 8, 14_336.0), (8, 7168, 16, 107_520.0), (1, 100, 1, 0.0), (4, 64, 2, 256.0),
    ):  # fmt: skip
        same(
            lab.all_to_all_bytes(top_k, hidden, world), expected,
            f"top {top_k} of {hidden} on {world} ranks: a row for each expert, less those at home",
        )  # fmt: skip
    same(
        lab.all_to_all_bytes(2, 4096, 8), lab.ring_allreduce_traffic_per_rank(8192, 8),
        "top 2 on 8 ranks: to and fro as much as two ring all-reduces",
    )  # fmt: skip


def test_expert_traffic_is_counted(lab):
    came = lab.expert_traffic(np.array([[[0, 1]], [[0, 3]]]), 4, 10)
    same(
        np.asarray(came).tolist(),
        [[0, 0], [10, 0]],
        "experts 0, 1 at home on rank 0; 0, 3 from rank 1",
    )
    ids = np.array([[[2, 3]], [[0, 3]]])
    same(
        np.asarray(lab.expert_traffic(ids, 4, 10)).tolist(),
        [[0, 20], [10, 0]],
        "a row for each expert",
    )
    same(
        np.asarray(lab.expert_traffic(ids, 4, 10, True)).tolist(), [[0, 10], [10, 0]],
        "once for each rank: experts 2 and 3 share the row that travels",
    )  # fmt: skip
    hot = np.zeros((4, 6, 1), int)
    same(
        np.asarray(lab.expert_traffic(hot, 8, 5)).tolist(),
        [[0, 0, 0, 0], [30, 0, 0, 0], [30, 0, 0, 0], [30, 0, 0, 0]],
        "everybody wants expert 0: one rank receives what should go to four",
    )
    even = np.tile(np.arange(8)[:, None], (4, 1, 1))
    per_token = lab.expert_traffic(even, 8, 2 * 64).sum() / even[..., 0].size
    near(
        float(per_token), lab.all_to_all_bytes(1, 64, 4),
        "each expert as often as each other: bytes a token, counted and by the formula",
    )  # fmt: skip


def test_bad_input_is_refused(lab):
    for call, why in (
        (lambda: lab.allreduce_payload_bytes(-1, 4096), "-1 tokens"),
        (lambda: lab.ring_allreduce_traffic_per_rank(10, 0), "no rank"),
        (lambda: lab.ring_allreduce_traffic_per_rank(-10, 2), "-10 bytes"),
        (lambda: lab.allreduce_time_s(10, 2, 0, 1e-6), "no bandwidth"),
        (lambda: lab.allreduce_time_s(10, 2, 1e9, -1e-6), "an arrival before the departure"),
        (lambda: lab.direct_allreduce_time_s(10, 2, 1e9, 0, 3), "three shots"),
        (lambda: lab.crossover_bytes(0, 1e9, 0), "no rank"),
        (lambda: lab.one_shot_limit_bytes(4, -1, 0), "a bandwidth below 0"),
        (lambda: lab.tp_comm_time_per_step(-1, 1, 64, 2, 1e9, 0), "-1 layers"),
        (lambda: lab.tp_comm_time_per_step(1, 1, 64, 0, 1e9, 0), "no rank"),
        (lambda: lab.comm_fraction(-1, 2), "a time below 0"),
        (lambda: lab.all_to_all_bytes(-1, 64, 2), "-1 experts a token"),
        (lambda: lab.expert_traffic(np.zeros((3, 1, 1), int), 8, 4), "8 experts on 3 ranks"),
        (lambda: lab.expert_traffic(np.full((2, 1, 1), 8), 8, 4), "expert 8 of 8"),
        (lambda: lab.expert_traffic(np.full((2, 1, 1), -1), 8, 4), "expert -1"),
        (lambda: lab.ring_all_reduce([np.ones(4)], lab.Ring(2)), "one array for two ranks"),
        (lambda: lab.ring_all_reduce([np.ones(4), np.ones(2)], lab.Ring(2)), "other lengths"),
        (lambda: lab.ring_all_reduce([np.ones(3), np.ones(3)], lab.Ring(2)), "3 numbers, 2 ranks"),
    ):
        refused(call, why)
