"""What lab 15-03 pins: two ledgers, their units, and a decision with two grounds."""

from __future__ import annotations

import itertools
import math

from labkit import refused, same

LLAMA_8B = 131_072
LLAMA_70B = 2 * 80 * 8 * 128 * 2
MLA = 61 * 576 * 2
PREFILL_S = 2048 / 10_000


def close(got, expected, why):
    assert math.isclose(got, expected, rel_tol=1e-9), f"{why}\nexpected {expected}\ncame     {got}"


def test_payload_is_real_freight(lab):
    """A prompt is thought of as text; on the wire an 8B's token is 128 KiB."""
    came = lab.kv_payload_bytes(2048, LLAMA_8B)
    same(
        (came, type(came)), (268_435_456, int), "2,048 tokens of an 8B are 256 MiB, in whole bytes"
    )
    same(lab.kv_payload_bytes(0, LLAMA_8B), 0, "no tokens")


def test_payload_scales_with_model_not_just_prompt(lab):
    """Topology decided by parameters, when layers, KV heads and compression decide it."""
    for what, per_token, mib in (
        ("70B: 80 layers, 8 KV heads", LLAMA_70B, 640),
        ("MLA: one latent of 576 in each of 61 layers", MLA, 137.25),
        ("8B with fp8 KV", LLAMA_8B // 2, 128),
    ):
        same(lab.kv_payload_bytes(2048, per_token) / 2**20, mib, f"MiB of 2,048 tokens, {what}")


def test_link_speed_is_the_whole_story(lab, record_property):
    """Bits for bytes, and 2^30 for 1e9: links are sold in bits and in powers of ten."""
    payload = 2048 * LLAMA_8B
    for gbps in (200, 25, 10):
        close(
            lab.transfer_seconds(payload, gbps), payload / (gbps * 1e9 / 8),
            f"seconds of {payload:,} bytes at {gbps} Gb/s (1 Gb/s is 125,000,000 bytes a second)",
        )  # fmt: skip
    slow = lab.transfer_seconds(payload, 10)
    close(slow, 0.2147483648, "the same prompt at 10 Gb/s")
    record_property("measured.ten_gbps_ms", 1000 * slow)


def test_interference_math_is_phase3_lab05(lab):
    """A step that does two things is believed to take as long as the longer one."""
    close(lab.colocated_itl_worst(0.010, 0.025), 0.035, "one step computes both")
    close(lab.colocated_itl_worst(0.010, 0.0), 0.010, "no prompt in the step")


def test_ttft_penalty_fractions(lab):
    """A ratio the wrong way round."""
    for gbps, share in ((200, 0.0524288), (25, 0.4194304), (10, 1.048576)):
        moved = 2048 * LLAMA_8B * 8 / (gbps * 1e9)
        close(lab.disagg_ttft_penalty(moved, PREFILL_S), share, f"penalty at {gbps} Gb/s")
    same(lab.disagg_ttft_penalty(0.0, 1.0), 0.0, "nothing to move")


def test_the_decision_both_ways(lab):
    """One good number taken for a decision: a split needs both."""
    fast, slow = 0.0107, 0.2147
    for chunk, moved, grounds in (
        (0.025, fast, set()), (0.025, slow, {"wire"}), (0.001, fast, {"interference"}),
        (0.001, slow, {"interference", "wire"}),
    ):  # fmt: skip
        given = 0.010, chunk, moved, PREFILL_S
        where = f"decode 10 ms, chunk {chunk * 1000:g} ms, wire {moved * 1000:g} ms, prefill 204.8"
        same(set(lab.grounds_against(*given)), grounds, where)
        same(lab.disagg_wins(*given), not grounds, where)


def test_a_limit_that_is_met_is_met(lab):
    """A limit taken for its own violation."""
    same(
        lab.disagg_wins(0.5, 0.25, 0.25, 1.0), True,
        "a gain of exactly 1.5 and a penalty of exactly 0.25",
    )  # fmt: skip
    kept = {"min_itl_gain": 2.0, "max_ttft_penalty": 0.125}
    same(
        lab.grounds_against(0.5, 0.25, 0.25, 1.0, **kept), {"interference", "wire"},
        "the same with limits of 2.0 and 0.125",
    )  # fmt: skip


def test_no_prompt_length_in_the_penalty(lab, record_property):
    """Longer prompts blamed for a slow link: both sides of the ratio grow together."""
    link = lab.slowest_link_gbps(10_000, LLAMA_8B, 0.25)
    close(link, 41.94304, "Gb/s for an 8B at 10,000 tokens a second and a penalty of 25 %")
    for tokens in (1, 128, 32_768):
        payload = lab.kv_payload_bytes(tokens, LLAMA_8B)
        close(
            lab.disagg_ttft_penalty(lab.transfer_seconds(payload, link), tokens / 10_000), 0.25,
            f"the penalty of {tokens} tokens on that link",
        )  # fmt: skip
    record_property("measured.slowest_gbps", link)


def test_which_pool_is_the_narrow_one(lab, record_property):
    """A wire that is priced per request and forgotten per second."""
    fast = lab.prompts_per_second(10_000, LLAMA_8B, 200, 2048)
    close(fast, 10_000 / 2048, "prompts a second at 200 Gb/s: the prefiller is the narrow one")
    slow = lab.prompts_per_second(10_000, LLAMA_8B, 10, 2048)
    close(slow, 10e9 / (2048 * LLAMA_8B * 8), "at 10 Gb/s the wire is the narrow one")
    edge = lab.slowest_link_gbps(10_000, LLAMA_8B, 1.0)
    close(edge, 10.48576, "Gb/s at which both are equal: a penalty of 1")
    record_property("measured.sustained", 200 / edge * 10_000 / 2048)


def test_monotone_in_link_and_chunk(lab):
    """A sign or a power that only shows away from the examples."""
    times = [lab.transfer_seconds(10**9, gbps) for gbps in (1, 10, 25, 100, 400)]
    assert times == sorted(times, reverse=True), f"a faster link takes longer: {times}"
    for chunk, gbps in itertools.product((0.0, 0.004, 0.02, 0.1), (5, 40, 400)):
        moved = lab.transfer_seconds(2048 * LLAMA_8B, gbps)
        wins = lab.disagg_wins(0.010, chunk, moved, PREFILL_S)
        same(wins, chunk >= 0.005 and gbps >= 41.94304, f"chunk {chunk} s, {gbps} Gb/s")


def test_what_makes_no_sense_is_refused(lab):
    """A division by zero far from its cause, and a negative price that looks like a gain."""
    for call, what in (
        (lambda: lab.kv_payload_bytes(-1, 1), "-1 tokens"),
        (lambda: lab.kv_payload_bytes(1, -1), "-1 bytes a token"),
        (lambda: lab.transfer_seconds(-1, 1), "-1 bytes"),
        (lambda: lab.transfer_seconds(1, 0), "a link of 0"),
        (lambda: lab.transfer_seconds(1, -1), "a link below 0"),
        (lambda: lab.disagg_ttft_penalty(-1.0, 1.0), "a negative transfer"),
        (lambda: lab.disagg_ttft_penalty(1.0, 0.0), "a prefill of 0 s"),
        (lambda: lab.disagg_ttft_penalty(1.0, -1.0), "a prefill below 0 s"),
        (lambda: lab.colocated_itl_worst(0.0, 1.0), "a decode step of 0 s"),
        (lambda: lab.colocated_itl_worst(-1.0, 1.0), "a decode step below 0 s"),
        (lambda: lab.colocated_itl_worst(1.0, -0.1), "a negative chunk"),
        (lambda: lab.disagg_wins(1, 1, 1, 1, min_itl_gain=0), "a gain of 0"),
        (lambda: lab.disagg_wins(1, 1, 1, 1, max_ttft_penalty=-0.1), "a negative penalty"),
        (lambda: lab.slowest_link_gbps(0, 1, 1), "a prefiller of 0 tokens a second"),
        (lambda: lab.slowest_link_gbps(1, 0, 1), "0 bytes a token"),
        (lambda: lab.slowest_link_gbps(1, 1, 0), "a penalty of 0: no link is fast enough"),
        (lambda: lab.prompts_per_second(0, 1, 1, 1), "a prefiller of 0 tokens a second"),
        (lambda: lab.prompts_per_second(1, 0, 1, 1), "a prompt of 0 bytes a token"),
        (lambda: lab.prompts_per_second(1, 1, 0, 1), "a link of 0"),
        (lambda: lab.prompts_per_second(1, 1, 1, 0), "a prompt of 0 tokens"),
    ):
        refused(call, what)
    same(lab.transfer_seconds(0, 10), 0.0, "0 bytes are a count, not a mistake")
    same(
        lab.disagg_wins(1, 1, 0, 1, max_ttft_penalty=0), True,
        "nothing to move under a limit of 0: met",
    )  # fmt: skip
