"""What lab 07-02 pins: the bytes of a step, the line through measured steps, and launch counts.

Measured are decode steps of vLLM 0.22.1 on an H100, in `benchmarks/gpu/models.json`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import refused, same

HERE = Path(__file__).parent
MEASURED = json.loads((HERE.parents[2] / "benchmarks" / "gpu" / "models.json").read_text())
MOE = MEASURED["arms"]["moe"]["config"]
STEPS = {int(b): statistics.median(ms) for b, ms in MEASURED["arms"]["moe"]["decode_ms"].items()}
GRANITE = {
    "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 8,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 49155,
}  # fmt: skip
KERNELS = {
    "fused_moe_kernel": "experts",
    "void vllm::moe::topkGating<8, 32, 4, 16, 32, int>(float const*, bool const*, float*)": "route",
    "void vllm::moe::moeSoftmax<256, float>(float const*, bool const*, float*, int)": "route",
    "void vllm::moe::moeTopK<256, int>(float const*, bool const*, float*, int*)": "route",
    "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*, int*)": "align",
    "void vllm::moe::moe_align_block_size_small_batch_expert_kernel<int>(int*)": "align",
    "void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*, int*)": "align",
    "void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162>(c10::BFloat16*)": "activation",
    "void vllm::moe::moe_sum_kernel<c10::BFloat16, 2>(c10::BFloat16*)": "combine",
    "void flash::FlashAttnFwdSm90<cutlass::KernelTraits>(Params)": "attention",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(void*)": "attention",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "gemm",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)": "gemm",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float*)": "other",
}


# --- bytes ----------------------------------------------------------------------------------------


def test_experts_touched(lab, record_property):
    for asked, expected in (((8, 2, 1), 2), ((8, 2, 4), 5.46875), ((60, 4, 16), 40.1),
                            ((256, 8, 64), 222.4), ((128, 8, 8), 51.62)):  # fmt: skip
        got = lab.experts_touched(*asked)
        assert math.isclose(got, expected, rel_tol=2e-3), (
            f"{asked[1]} of {asked[0]} experts, {asked[2]} tokens: an expert is left out by one "
            f"with 1 - k/E\nexpected {expected}\ncame     {got}"
        )
    record_property("measured.touched_at_64", lab.experts_touched(128, 8, 64))


def test_bytes_of_a_step_by_part(lab):
    got = lab.step_bytes(MOE, 1)
    expected = {
        "experts": 24 * 8 * 3 * 2048 * 768 * 2,
        "attention": 24 * 2048 * (2 * 4096 + 2 * 512) * 2,
        "router": 24 * 2048 * 128 * 2,
        "head": 151936 * 2048 * 2,
    }
    for part, value in expected.items():
        assert math.isclose(got[part], value, rel_tol=1e-9), (
            f"one token, {part}: expected {value:,} bytes, came {got[part]:,.0f}; an expert is "
            "three matrices of 2048 x 768, and Q and O are 4096 wide, not 2048"
        )
    many = lab.step_bytes(MOE, 64)
    dense = ("attention", "router", "head")
    same([many[p] for p in dense], [got[p] for p in dense], "more tokens, the same dense weights")


def test_shares_of_a_small_model_and_of_equal_prompts(lab, record_property):
    parts = lab.step_bytes(GRANITE, 8)
    share = parts["experts"] / sum(parts.values())
    assert abs(share - 0.896) < 2e-3, f"8 of 32 experts, 8 tokens: 89.6 % are experts, came {share}"
    alike = lab.step_bytes(GRANITE, 8, distinct=1)
    share = alike["experts"] / sum(alike.values())
    assert abs(share - 0.705) < 2e-3, (
        f"8 equal prompts choose the same 8 experts: 70.5 % and a third of the bytes, came {share}"
    )
    record_property("measured.alike", sum(alike.values()) / sum(parts.values()))


# --- a measured step ------------------------------------------------------------------------------


def test_a_line_by_hand(lab):
    fixed, speed = lab.fit_step_time([1e9, 3e9], [2.0, 3.0])
    assert math.isclose(fixed, 1.5) and math.isclose(speed, 2e12), (
        f"2 GB more take 1 ms more: 2e12 bytes/s, and 1.5 ms are left at no bytes; came {fixed} ms "
        f"and {speed:.3g} bytes/s"
    )
    refused(lambda: lab.fit_step_time([1e9, 1e9], [2.0, 2.1]), "two equal numbers of bytes")


def test_two_steps_predict_the_five_others(lab, record_property):
    amount = {batch: sum(lab.step_bytes(MOE, batch).values()) for batch in STEPS}
    ends = (1, 64)
    fixed, speed = lab.fit_step_time([amount[b] for b in ends], [STEPS[b] for b in ends])
    for batch, measured in STEPS.items():
        expected = fixed + amount[batch] / speed * 1e3
        assert abs(expected / measured - 1) < 0.04, (
            f"batch {batch}: a line through batches 1 and 64 says {expected:.2f} ms, measured were "
            f"{measured:.2f} (H100, vLLM 0.22.1, random weights); experts touched explain the curve"
        )
    assert 1.5 < fixed < 2.1 and 2.2e12 < speed < 2.5e12, (
        f"{fixed:.2f} ms and {speed / 1e12:.2f} TB/s: expected about 1.8 ms and 2.35 TB/s"
    )
    record_property("measured.of_peak", speed / 3.35e12)


# --- a profile ------------------------------------------------------------------------------------


def test_kernels_have_a_category(lab):
    for name, expected in KERNELS.items():
        got = lab.categorise(name)
        assert got == expected, f"{name}: expected {expected!r}, came {got!r}"


def test_launches_of_a_step_are_a_contract(lab):
    got = lab.expected_launches(GRANITE, 8, 31)
    same(got, {"experts": 1488, "route": 744, "align": 744, "activation": 744, "combine": 0},
         "24 layers x 31 steps; two products a layer; 64 pairs of 32 experts are aligned by one "
         "kernel; 8 experts a token are summed by torch")  # fmt: skip
    mixtral = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32}
    same(lab.expected_launches(mixtral, 1, 1)["align"], 0, "2 pairs x 4 are no more than 8 experts")
    same(lab.expected_launches(mixtral, 2, 1)["align"], 32, "4 pairs x 4 are more than 8 experts")
    same(lab.expected_launches(mixtral, 512, 1)["align"], 64, "1,024 pairs: two kernels a layer")
    same(
        lab.expected_launches(MOE, 64, 1)["align"],
        48,
        "128 experts: two kernels, whatever the batch",
    )
    same(lab.expected_launches(mixtral, 1, 1)["combine"], 32, "two experts a token: vLLM's kernel")
    qwen2 = {"num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24}
    same(
        lab.expected_launches(qwen2, 8, 1)["route"],
        48,
        "60 is no power of two: softmax, then top-k",
    )
    same([lab.expected_launches(qwen2, b, 1)["align"] for b in (3, 4)], [0, 24], "48 and 64 of 60")


def test_shares_add_up(lab):
    rows = [(name, 10.0) for name in KERNELS] + [("fused_moe_kernel", 60.0)]
    got = lab.time_shares(rows)
    assert math.isclose(sum(got.values()), 1.0), f"shares of all categories sum to 1; came {got}"
    assert math.isclose(got["experts"], 0.35) and math.isclose(got["align"], 0.15), (
        f"70 of 200 microseconds are experts, 30 alignment; came {got}"
    )
    only = lab.time_shares([("fused_moe_kernel", 1.0)])
    same(sorted(only), sorted(lab.CATEGORIES), "a category without time is 0, not missing")
    refused(lambda: lab.time_shares([]), "no rows: perhaps the wrong process was profiled")


def run_module():
    spec = importlib.util.spec_from_file_location("profile_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_run_script_predicts_without_a_gpu(lab):
    assert lab.experts_touched(8, 2, 1) == 2, "write the lab first: 2 of 8 experts for one token"
    said = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--predict", "--file", str(HERE / "solution.py")],
        capture_output=True, text=True, check=False, cwd=HERE.parents[2], timeout=60,
    )  # fmt: skip
    assert said.returncode == 0, f"run.py --predict failed:\n{said.stderr[-1500:]}"
    assert "not measured" in said.stdout, f"a prediction must say that it is one:\n{said.stdout}"


@pytest.mark.gpu
def test_launches_on_a_gpu(lab, gpu_device):
    pytest.importorskip("vllm")
    run = run_module()
    found = run.profile(run.SMALL, batch=8, steps=16)
    counted = run.counted(found, lab)
    for category, expected in lab.expected_launches(run.SMALL, 8, 16).items():
        assert counted[category] == expected, (
            f"{category}: {counted[category]} launches in 16 decode steps, expected {expected}"
        )
