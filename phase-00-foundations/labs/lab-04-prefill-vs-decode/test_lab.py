"""What lab 00-04 pins: intensity, the ridge, the decode ceiling, and the KV term most leave out."""

from __future__ import annotations

import json
import math

import pytest

A100 = {"peak_flops": 312e12, "mem_bw": 2.0e12}  # dense bf16 FLOP/s, bytes/s
N_8B = 8e9
KV_8B = 131_072  # bytes of KV cache per token, Llama-3-8B in bf16
ATTENTION_8B = 524_288  # FLOP per token and context token, Llama-3-8B


def close(got: float, expected: float, why: str) -> None:
    assert got == pytest.approx(expected, rel=1e-9), f"{why}; you have {got!r}"


def test_a100_ridge_point(lab):
    close(
        lab.ridge_point(**A100),
        156.0,
        "312e12 FLOP/s over 2.0e12 bytes/s is 156 FLOP per byte: below it the memory is the limit",
    )


def test_flops_and_bytes_of_a_step(lab):
    close(
        lab.step_flops(N_8B, 1),
        16e9,
        "one token through 8e9 weights: a multiplication and an addition each, 16e9 FLOP",
    )
    close(
        lab.step_flops(N_8B, 2048) / A100["peak_flops"],
        2 * 8e9 * 2048 / 312e12,
        "a 2,048-token prefill needs at least 105 ms of arithmetic on an A100",
    )
    close(lab.step_bytes(N_8B), 16e9, "8e9 weights of 2 bytes, read once, are 16e9 bytes")
    close(lab.step_bytes(N_8B, 0.5), 4e9, "the same weights in int4 are 4e9 bytes")


def test_intensity_is_just_tokens_over_dtype(lab):
    for n_params in (N_8B, 70e9):
        for dtype_bytes, factor in ((2, 1.0), (1, 2.0), (0.5, 4.0)):
            for num_tokens in (1, 64, 2048):
                close(
                    lab.arithmetic_intensity(n_params, num_tokens, dtype_bytes),
                    factor * num_tokens,
                    f"{num_tokens} tokens at {dtype_bytes} bytes per weight: 2 x tokens / bytes = "
                    f"{factor * num_tokens} FLOP per byte, whatever the model ({n_params:.0e})",
                )


def test_single_decode_is_hopelessly_bandwidth_bound(lab):
    assert lab.is_compute_bound(N_8B, 1, **A100) is False, (
        "one token has intensity 1 and the ridge is 156: decode alone is bandwidth-bound"
    )
    utilisation = lab.arithmetic_intensity(N_8B, 1) / lab.ridge_point(**A100)
    close(utilisation, 1 / 156, "a single decode can use at most 1/156 = 0.64% of the arithmetic")


def test_prefill_is_compute_bound(lab):
    assert lab.is_compute_bound(N_8B, 2048, **A100) is True, (
        "2,048 tokens read the weights once and compute 2,048 times as much: intensity 2,048"
    )


def test_critical_batch_size_is_the_ridge(lab, record_property):
    assert lab.is_compute_bound(N_8B, 155, **A100) is False, "155 tokens: intensity 155 < 156"
    assert lab.is_compute_bound(N_8B, 156, **A100) is True, (
        "156 tokens: intensity equals the ridge, both take 8 ms, and that counts as compute-bound"
    )
    got = [lab.is_compute_bound(N_8B, tokens, **A100, dtype_bytes=1) for tokens in (77, 78)]
    assert got == [False, True], (
        f"in fp8 a byte is one weight, so 78 tokens are at the ridge and 77 below; you have {got}"
    )
    for dtype_bytes, expected in ((2, 156.0), (1, 78.0), (0.5, 39.0)):
        close(
            lab.critical_tokens(**A100, dtype_bytes=dtype_bytes),
            expected,
            f"at {dtype_bytes} bytes per weight the ridge is reached at {expected} tokens per step",
        )
    record_property("measured.critical", lab.critical_tokens(**A100, dtype_bytes=0.5))


def test_decode_speed_limit_8b_fp16(lab):
    close(
        lab.decode_tokens_per_second(N_8B, A100["mem_bw"]),
        125.0,
        "16e9 bytes at 2.0e12 bytes/s take 8 ms, so one request gets at most 125 tokens/s",
    )


def test_batching_multiplies_decode_throughput_for_free(lab):
    close(
        lab.decode_tokens_per_second(N_8B, A100["mem_bw"], batch=64),
        8000.0,
        "64 requests share one read of the weights: 64 tokens every 8 ms (KV not counted yet)",
    )


def test_compute_roof_caps_batching(lab):
    for batch, expected in ((64, 8000.0), (156, 19_500.0), (312, 19_500.0)):
        close(
            lab.decode_tokens_per_second(
                N_8B, A100["mem_bw"], batch=batch, peak_flops=A100["peak_flops"]
            ),
            expected,
            f"batch {batch}: past 156 each request adds as much time as it adds tokens, so the "
            f"limit is {expected} tokens/s",
        )


def test_quantization_scales_decode_only(lab):
    close(
        lab.decode_tokens_per_second(N_8B, A100["mem_bw"], dtype_bytes=0.5),
        500.0,
        "int4 weights are 4e9 bytes: 2 ms per step, 500 tokens/s, four times fp16",
    )
    close(
        lab.decode_tokens_per_second(N_8B, A100["mem_bw"], 2048, 0.5, A100["peak_flops"]),
        lab.decode_tokens_per_second(N_8B, A100["mem_bw"], 2048, 2, A100["peak_flops"]),
        "with 2,048 tokens per step the arithmetic decides, and fewer weight bytes change nothing",
    )


def test_attention_intensity_is_the_gqa_ratio(lab):
    flops = lab.attention_flops_per_context_token(32, 32, 128)
    assert flops == ATTENTION_8B, (
        "Llama-3-8B: 4 FLOP x 32 layers x 32 query heads x 128 = 524,288 per token and context "
        f"token; you have {flops:,}"
    )
    close(
        flops / KV_8B,
        4.0,
        "the cache holds 8 KV heads for 32 query heads, so attention does 4 FLOP per byte it reads,"
        " at any batch size",
    )


def test_kv_term_halves_throughput_at_2k(lab):
    got = lab.decode_tokens_per_second_with_kv(N_8B, A100["mem_bw"], 64, 2048, KV_8B)
    assert round(got) == 3858, (
        "64 requests with 2,048 tokens each read 16e9 + 64 x 2,048 x 131,072 = 33.2e9 bytes a "
        f"step: 16.6 ms, 3,858 tokens/s, where the weights alone promised 8,000; you have {got:.1f}"
    )
    close(
        lab.decode_tokens_per_second_with_kv(N_8B, A100["mem_bw"], 64, 16e9 / (64 * KV_8B), KV_8B),
        4000.0,
        "at 1,907 tokens of context the KV of 64 requests weighs as much as the weights: half of "
        "8,000",
    )


def test_weights_in_fewer_bits_leave_the_cache_as_it_is(lab):
    read = 4e9 + 64 * 2048 * KV_8B
    close(
        lab.decode_tokens_per_second_with_kv(N_8B, A100["mem_bw"], 64, 2048, KV_8B, 0.5),
        64 / (read / A100["mem_bw"]),
        "int4 weights are 4e9 bytes, the cache of 64 x 2,048 tokens 17.2e9 as before",
    )
    close(
        lab.decode_intensity_with_kv(N_8B, 64, 2048, KV_8B, ATTENTION_8B, 0.5),
        64 * (16e9 + 2048 * ATTENTION_8B) / read,
        "the same FLOP over fewer bytes of weights",
    )


def test_kv_saturates_intensity(lab):
    for context, expected in ((512, 242.4), (2048, 63.6)):
        got = lab.decode_intensity_with_kv(N_8B, 1e9, context, KV_8B, ATTENTION_8B)
        assert round(got, 1) == expected, (
            f"with {context} tokens of context the intensity tends to {expected} FLOP per byte "
            f"however large the batch; you have {got:.1f}"
        )
    got = lab.decode_intensity_with_kv(N_8B, 64, 2048, KV_8B, ATTENTION_8B)
    expected = 64 * (16e9 + 2048 * ATTENTION_8B) / (16e9 + 64 * 2048 * KV_8B)
    close(got, expected, f"batch 64 at 2,048 tokens: {expected:.1f} FLOP per byte, not 64")


def test_context_limit_is_about_800(lab):
    got = lab.compute_bound_context_limit(
        N_8B, **A100, kv_bytes_per_token=KV_8B, attention_flops=ATTENTION_8B
    )
    assert math.floor(got) == 803, (
        "16e9 / (156 x 131,072 - 524,288) = 803.1 tokens: with more context than that no batch "
        f"makes an 8B model compute-bound on an A100; you have {got!r}"
    )
    for context, compute_bound in ((803, True), (804, False)):
        intensity = lab.decode_intensity_with_kv(N_8B, 1e9, context, KV_8B, ATTENTION_8B)
        assert (intensity >= lab.ridge_point(**A100)) is compute_bound, (
            f"the limit and the intensity must agree: at {context} tokens a huge batch is "
            f"{'at least' if compute_bound else 'below'} the ridge; you have {intensity:.3f}"
        )
    try:
        got = lab.compute_bound_context_limit(N_8B, 4e12, 1e12, KV_8B, ATTENTION_8B)
    except ZeroDivisionError as error:
        got = error
    assert got == math.inf, (
        "with a ridge of exactly 4 attention alone reaches it, in the limit: no context is too "
        f"long; you have {got!r}"
    )
    got = lab.compute_bound_context_limit(N_8B, 312e12, 312e12, KV_8B, ATTENTION_8B)
    assert got == math.inf, (
        f"with a ridge of 1 attention's own 4 FLOP per byte suffice: no limit; you have {got!r}"
    )


def test_bad_input_is_refused(lab):
    calls = {
        "peak_flops": lambda bad: lab.ridge_point(bad, 1e12),
        "mem_bw": lambda bad: lab.decode_tokens_per_second(8e9, bad),
        "n_params": lambda bad: lab.step_flops(bad, 1),
        "num_tokens": lambda bad: lab.arithmetic_intensity(8e9, bad),
        "dtype_bytes": lambda bad: lab.step_bytes(8e9, bad),
        "batch": lambda bad: lab.decode_tokens_per_second(8e9, 1e12, batch=bad),
        "context_len": lambda bad: lab.decode_tokens_per_second_with_kv(8e9, 1e12, 1, bad, 2),
    }
    for name, call in calls.items():
        for bad in (0, -1, float("nan")):
            try:
                got = call(bad)
            except ValueError as error:
                assert name in str(error), (
                    f"{name}={bad} must be refused by a message that names {name}; it says: {error}"
                )
                continue
            pytest.fail(f"{name}={bad} must raise ValueError; it gave {got!r}", pytrace=False)


def test_every_argument_of_every_function_is_checked(lab):
    hardware = {"peak_flops": 312e12, "mem_bw": 2e12}
    cache = {"kv_bytes_per_token": KV_8B, "attention_flops": ATTENTION_8B}
    good = {
        "ridge_point": hardware,
        "step_flops": {"n_params": 8e9, "num_tokens": 4},
        "step_bytes": {"n_params": 8e9, "dtype_bytes": 2},
        "arithmetic_intensity": {"n_params": 8e9, "num_tokens": 4, "dtype_bytes": 2},
        "is_compute_bound": {"n_params": 8e9, "num_tokens": 4, **hardware, "dtype_bytes": 2},
        "critical_tokens": {**hardware, "dtype_bytes": 2},
        "decode_tokens_per_second": {"n_params": 8e9, **hardware, "batch": 4, "dtype_bytes": 2},
        "attention_flops_per_context_token": {"num_layers": 2, "num_heads": 2, "head_dim": 2},
        "decode_intensity_with_kv": {
            "n_params": 8e9, "batch": 4, "context_len": 9, **cache, "dtype_bytes": 2,
        },
        "decode_tokens_per_second_with_kv": {
            "n_params": 8e9, "mem_bw": 2e12, "batch": 4, "context_len": 9,
            "kv_bytes_per_token": KV_8B, "dtype_bytes": 2,
        },
        "compute_bound_context_limit": {"n_params": 8e9, **hardware, **cache},
    }  # fmt: skip
    for function, arguments in good.items():
        got = getattr(lab, function)(**arguments)
        assert got is not None and got >= 0, (
            f"{function}({arguments}) is a number; you have {got!r}"
        )
        for name in arguments:
            try:
                got = getattr(lab, function)(**{**arguments, name: 0})
            except ValueError as error:
                assert name in str(error), f"{function}: the message names {name}; it says: {error}"
                continue
            except ZeroDivisionError as error:
                got = error
            pytest.fail(
                f"{function} with {name}=0 must raise ValueError; it gave {got!r}", pytrace=False
            )


def test_roofline_survives_a_trip_through_json(lab):
    inputs = {
        **A100,
        "n_params": N_8B,
        "kv_bytes_per_token": KV_8B,
        "attention_flops": ATTENTION_8B,
        "points": [{"batch": 1, "context_len": 512}, {"batch": 4096, "context_len": 256}],
    }
    got = json.loads(json.dumps(lab.roofline(json.loads(json.dumps(inputs)))))
    assert [point["bound"] for point in got["points"]] == ["memory", "compute"], (
        "one short request is memory-bound, 4,096 requests of 256 tokens are compute-bound; "
        f"you have {got['points']}"
    )
    close(got["points"][1]["attainable_flops"], 312e12, "compute-bound means the flat roof")
