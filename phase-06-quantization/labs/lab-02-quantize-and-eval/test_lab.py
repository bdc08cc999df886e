"""What lab 06-02 pins: bytes before percentages, a ceiling for every claim, a log read exactly."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UPSTREAM = HERE.parents[2] / "upstream"


def qwen_05b(lab, **changes):
    """Qwen2.5-0.5B: 14 query heads on 2 KV heads, one matrix for table and head."""
    usual = {
        "hidden": 896,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "head_dim": 64,
        "intermediate": 4864,
        "vocab": 151936,
        "tied": True,
        "qkv_bias": True,
    }
    return lab.ModelShape(**{**usual, **changes})


def qwen_7b(lab):
    """Qwen2.5-7B: table and head are two matrices."""
    return lab.ModelShape(3584, 28, 28, 4, 128, 18944, 152064, False, True)


def byte_llama(lab, **changes):
    return lab.ModelShape(
        **{
            "hidden": 256,
            "layers": 4,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "intermediate": 768,
            "vocab": 257,
            "tied": True,
            "qkv_bias": False,
            **changes,
        }
    )


# --- Part A ---------------------------------------------------------------------------------------


def test_param_split_matches_known_total(lab):
    got = tuple(lab.split_params(qwen_05b(lab)) or ())
    assert got == (357_826_560, 136_206_208), (
        "Qwen2.5-0.5B has 494,032,768 parameters. Linear, per layer: q and o 896 x 896, k and v "
        "896 x 128, three of 896 x 4,864. Others: the table 151,936 x 896 once, 49 norms, biases "
        f"of 1,152 per layer.\nexpected (357,826,560, 136,206,208)\ncame     {got}"
    )
    total = sum(lab.split_params(qwen_7b(lab)))
    assert total == 7_615_616_512, (
        "Qwen2.5-7B, whose table and head are two matrices.\n"
        f"expected 7,615,616,512\ncame     {total:,}"
    )
    wide = lab.ModelShape(1024, 28, 16, 8, 128, 3072, 151936, True, False)
    linear = (lab.split_params(wide) or (None,))[0]
    assert linear == 440_401_920, (
        "Qwen3-0.6B: 16 heads of 128 are 2,048 wide, and hidden is 1,024. q is 1,024 x 2,048, o is "
        "2,048 x 1,024: heads * head_dim need not be hidden.\n"
        f"expected 440,401,920\ncame     {linear}"
    )


def test_param_split_of_the_shipped_model(lab):
    from mini_vllm.models.loader import load_checkpoint

    weights = load_checkpoint("byte-llama").weights
    linear = sum(w.size for name, w in weights.items() if name.endswith("proj.weight"))
    other = sum(w.size for w in weights.values()) - linear
    got = tuple(lab.split_params(byte_llama(lab)) or ())
    assert got == (linear, other), (
        "byte-llama, counted in its file: 28 projections; a table and 9 norms.\n"
        f"expected {(linear, other)}\ncame     {got}"
    )


def test_bits_per_weight_ledger(lab):
    cases = (
        ("bf16", 128, 16),
        ("fp8", 128, 8),
        ("w4_sym", 128, 4.125),
        ("w4_asym", 128, 4.15625),
        ("w4_sym", 32, 4.5),
        ("w4_asym", 32, 4.625),
    )
    for fmt, group, expected in cases:
        got = lab.bits_per_weight(fmt, group)
        assert got == expected, (
            f"{fmt}, groups of {group}: 4 bits of code, a 16-bit scale per group, and with "
            f"zero-points 4 bits more per group.\nexpected {expected}\ncame     {got}"
        )
    for fmt, group in (("int3", 128), ("w4_sym", 0), ("bf16", -1)):
        with pytest.raises(ValueError) as refused:
            lab.bits_per_weight(fmt, group)
        wrong = fmt if fmt == "int3" else str(group)
        assert wrong in str(refused.value), f"name what is wrong, {wrong}; came {refused.value}"


def test_unquantized_params_stay_16bit(lab):
    expected = {"bf16": 988_065_536, "fp8": 630_238_976, "w4_asym": 458_314_496}
    got = {fmt: lab.weight_bytes(qwen_05b(lab), fmt) for fmt in expected}
    counts = (lab.weight_bytes, lab.streamed_bytes)
    small = tuple(count(qwen_05b(lab), "w4_sym", 32) for count in counts)
    assert got == expected, (
        "Qwen2.5-0.5B: 27.6 % of the parameters are in the table, norms and biases, and keep 2 "
        f"bytes each. So FP8 is 64 % of bf16, not half.\nexpected {expected}\ncame     {got}"
    )
    assert small == (473_689_856,) * 2, (
        "the same in groups of 32: 4.5 bits for each linear weight. The group size goes all the "
        f"way down.\nexpected 473,689,856, in memory and streamed\ncame     {small}"
    )


def test_a_table_is_not_streamed_unless_it_is_the_head(lab):
    small, large = qwen_05b(lab), qwen_7b(lab)
    got = lab.streamed_bytes(small, "fp8")
    assert got == 630_238_976, (
        "a tied table is the head, and the head reads all of it in every step.\n"
        f"expected 630,238,976\ncame     {got:,}"
    )
    ratios = {}
    for fmt in ("fp8", "w4_asym"):
        ratios[fmt] = lab.streamed_bytes(large, "bf16") / lab.streamed_bytes(large, fmt)
    assert round(ratios["fp8"], 2) == 1.86 and round(ratios["w4_asym"], 2) == 3.16, (
        "Qwen2.5-7B: of its table of 1.09 GB a step reads a row per token; the head of the same "
        f"size it reads whole.\nexpected ratios 1.86 and 3.16\ncame     {ratios}"
    )


def test_kv_bytes_of_a_token(lab):
    cases = ((qwen_05b(lab), 2, 12_288), (qwen_05b(lab), 1, 6_144), (byte_llama(lab), 2, 2_048))
    for shape, size, expected in cases:
        got = lab.kv_bytes_per_token(shape, size)
        assert got == expected, (
            f"K and V, {shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, "
            f"{size} byte(s) each. The format of the weights has no part in it.\n"
            f"expected {expected:,}\n"
            f"came     {got:,}"
        )


def test_extra_kv_blocks(lab):
    expected = {"bf16": 0, "fp8": 1820, "w4_asym": 2694}
    got = {fmt: lab.extra_kv_blocks(qwen_05b(lab), fmt) for fmt in expected}
    assert got == expected, (
        "a block of 16 tokens is 196,608 bytes; 4 bits save 529,751,040, that is 2,694.5 of them, "
        f"and half a block holds nothing.\nexpected {expected}\ncame     {got}"
    )
    got = lab.extra_kv_blocks(qwen_05b(lab), "fp8", 32)
    assert got == 910, f"blocks of 32 are twice as large: 910; came {got}"


# --- Part B ---------------------------------------------------------------------------------------


def test_ceiling_and_crossover(lab):
    shape = qwen_05b(lab)
    for fmt, expected in (("bf16", 4858), ("fp8", 7616), ("w4_asym", 10473)):
        got = lab.decode_ceiling_tok_s(lab.streamed_bytes(shape, fmt), 16, 0.30e12)
        assert got is not None and round(got) == expected, (
            f"{fmt} on an L4, 300 GB/s, 16 sequences: 16 tokens for each time the weights are read "
            f"(GB is 1e9).\nexpected {expected:,}\ncame     {got}"
        )
    for name, flops, hbm, expected in (
        ("L4", 121e12, 0.30e12, 202),
        ("H100", 989e12, 3.35e12, 148),
        ("H200", 989e12, 4.8e12, 103),
    ):
        got = lab.crossover_batch(flops, hbm)
        assert got is not None and round(got) == expected, (
            f"{name}: reading a parameter of 1 byte takes 1 / hbm; multiplying one in 16 bits for "
            f"B tokens takes 2 B / flops16. Equal at flops16 / (2 hbm).\nexpected {expected}\n"
            f"came     {got}"
        )


def claimed():
    """Three rows as a page may show them for Qwen2.5-0.5B on an L4 at batch 16. None is true."""
    return [
        {"fmt": "bf16", "tok_s": 9800, "blocks": 12140},
        {"fmt": "fp8", "tok_s": 14200, "blocks": 18900},
        {"fmt": "w4_asym", "tok_s": 12600, "blocks": 21300},
    ]


def test_audit_flags_impossible_capture(lab):
    flags = lab.audit(claimed(), qwen_05b(lab), 16, 0.30e12)
    assert flags is not None and len(flags) == 5, (
        "three rates above their ceilings of 4,858, 7,616 and 10,473 tokens/s, and two gains, of "
        "6,760 and 9,160 blocks, where 1,820 and 2,694 are saved: five contradictions.\n"
        f"came {flags}"
    )
    formats = [flag.split(":")[0] for flag in flags]
    assert formats == ["bf16", "fp8", "w4_asym", "fp8", "w4_asym"], (
        f"first the rates, then the blocks, each with its format in front; came {flags}"
    )


def test_audit_accepts_plausible_rows(lab):
    rows = [
        {"fmt": "bf16", "tok_s": 4200, "blocks": 12140},
        {"fmt": "fp8", "tok_s": 6100, "blocks": 12140 + 1820},
        {"fmt": "w4_asym", "tok_s": 5900, "blocks": 12140 + 2600},
    ]
    flags = lab.audit(rows, qwen_05b(lab), 16, 0.30e12)
    assert flags == [], (
        "rates below the ceilings, and gains up to exactly what is saved; 4 bits slower than FP8 "
        f"is no contradiction, since a ceiling is only an upper bound.\ncame {flags}"
    )
    ceiling = lab.decode_ceiling_tok_s(lab.streamed_bytes(qwen_05b(lab), "fp8"), 16, 0.30e12)
    rows = [
        {"fmt": "bf16", "blocks": 12140},
        {"fmt": "fp8", "tok_s": ceiling, "blocks": 9000},
        {"fmt": "bf16", "blocks": 6000},
    ]
    flags = lab.audit(rows, qwen_05b(lab), 16, 0.30e12)
    assert flags == [], (
        "a rate at the ceiling, fewer blocks than bf16 has, a second bf16 row, which is not the "
        f"one to compare with: no contradiction.\ncame {flags}"
    )
    flags = lab.audit([{"fmt": "bf16", "tok_s": 3700}], qwen_7b(lab), 16, 3.35e12)
    assert flags == [], (
        "Qwen2.5-7B on an H100: 15.2 GB of weights allow 3,519 tokens/s at batch 16, but 1.09 GB "
        "of them are the table, which is not streamed. The ceiling is 3,790, and 3,700 can be "
        f"true.\ncame {flags}"
    )


def test_audit_takes_what_is_there(lab):
    rows = [{"fmt": "fp8", "blocks": 99_999}, {"fmt": "w4_asym", "tok_s": 1}]
    flags = lab.audit(rows, qwen_05b(lab), 16, 0.30e12)
    assert flags == [], f"no bf16 row to compare blocks with, and no rate too high; came {flags}"
    flags = lab.audit([{"fmt": "w4_asym", "tok_s": 99_999}], qwen_05b(lab), 16, 0.30e12)
    assert flags is not None and [flag.split(":")[0] for flag in flags] == ["w4_asym"], (
        f"a rate alone, above its ceiling: one contradiction; came {flags}"
    )
    rows = [
        {"fmt": "bf16", "blocks": 12140},
        {"fmt": "fp8", "blocks": 20000},
        {"fmt": "w4_asym", "tok_s": 99_999},
    ]
    flags = lab.audit(rows, qwen_05b(lab), 16, 0.30e12)
    assert flags is not None and [flag.split(":")[0] for flag in flags] == ["w4_asym", "fp8"], (
        f"a row may lack its rate or its blocks, whatever the others have: two flags; came {flags}"
    )
    rows = [{"fmt": "fp8", "blocks": 14_000}, {"fmt": "bf16", "blocks": 12_140}]
    for slack, expected in ((0, 1), (39, 1), (40, 0)):
        flags = lab.audit(rows, qwen_05b(lab), 16, 0.30e12, slack)
        assert flags is not None and len(flags) == expected, (
            f"1,860 blocks gained, 1,820 saved, {slack} of slack, and the base comes second: "
            f"expected {expected} flag(s), came {flags}"
        )


# --- Part C ---------------------------------------------------------------------------------------


LOG = (
    "INFO 01-01 00:00:00 [model.py:1] The model is convertible to awq_marlin during runtime. Using "
    "awq_marlin kernel.",
    "INFO 01-01 00:00:00 [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends",
    "INFO 01-01 00:00:00 [topk_topp_sampler.py:1] Using FlashInfer for top-p & top-k sampling.",
    "(EngineCore pid=7) INFO 01-01 00:00:00 [awq_marlin.py:1] Using MarlinLinearKernel for "
    "AWQMarlinLinearMethod",
    "(EngineCore pid=7) INFO 01-01 00:00:00 [gpu_model_runner.py:5133] Model loading took 0.44 GiB "
    "memory and 1.234567 seconds",
    "(EngineCore pid=7) INFO 01-01 00:00:00 [kv_cache_utils.py:1733] GPU KV cache size: 1,234,567 "
    "tokens\n",
)  # made here; no engine ran


def test_the_log_lines(lab):
    got = lab.read_log(LOG)
    expected = lab.RunLog(0.44, 1_234_567, (("MarlinLinearKernel", "AWQMarlinLinearMethod"),))
    assert got == expected, (
        "weights, tokens with commas, and a kernel with its method. awq_marlin, FLASH_ATTN and "
        f"FlashInfer are no kernel classes of a linear layer: their names do not end in Kernel.\n"
        f"expected {expected}\ncame     {got}"
    )
    more = [*LOG, "x Selected CutlassFP8ScaledMMLinearKernel for Fp8OnlineLinearMethod", LOG[3]]
    got = lab.read_log(more).kernels
    assert got == (
        ("MarlinLinearKernel", "AWQMarlinLinearMethod"),
        ("CutlassFP8ScaledMMLinearKernel", "Fp8OnlineLinearMethod"),
    ), f"Selected or Using, each pair once, in the order of the lines; came {got}"
    got = lab.read_log([*LOG, LOG[4].replace("0.44", "0.45"), LOG[5].replace("1,234", "999")])
    assert (got.weight_gib, got.kv_tokens) == (0.45, 999_567), (
        "each of these two lines stands twice in the log, as with a draft model or a second load: "
        f"the last one counts.\nexpected (0.45, 999567)\ncame     {got.weight_gib, got.kv_tokens}"
    )
    got = lab.read_log([])
    assert got == lab.RunLog(None, None, ()), f"lines that are not there are None; came {got}"


def test_the_formats_are_those_of_the_pinned_tree(lab):
    if not UPSTREAM.is_dir():
        pytest.skip("upstream/ is not here: course upstream fetch")

    def strings(path):
        tree = ast.parse((UPSTREAM / "vllm" / path).read_text(encoding="utf-8"))
        return [n.value for n in ast.walk(tree)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)]  # fmt: skip

    def the(path, start):
        return next(t for t in strings(path) if t.startswith(start))

    lines = [
        the("v1/worker/gpu_model_runner.py", "Model loading took") % ("0.93", 1.5),
        the("v1/core/kv_cache_utils.py", "GPU KV cache size") % f"{140_608:,}",
        the("model_executor/kernels/linear/__init__.py", "Selected %s for")
        % ("CutlassFP8ScaledMMLinearKernel", "Fp8OnlineLinearMethod"),
        the("model_executor/layers/quantization/awq_marlin.py", "Using %s for AWQMarlin")
        % "MarlinLinearKernel",
    ]
    got = lab.read_log(lines)
    expected = lab.RunLog(
        0.93,
        140_608,
        (
            ("CutlassFP8ScaledMMLinearKernel", "Fp8OnlineLinearMethod"),
            ("MarlinLinearKernel", "AWQMarlinLinearMethod"),
        ),
    )
    assert got == expected, (
        f"the pinned tree's own templates, filled in: {lines}.\nexpected {expected}\ncame     {got}"
    )


def test_outputs_agree_up_to_the_first_difference(lab):
    cases = (([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0), ([], [1], 0),
             ([1, 2], [1, 2, 3], 2))  # fmt: skip
    for base, other, expected in cases:
        got = lab.agreed_prefix(base, other)
        assert got == expected, (
            f"{base} and {other}: after the first difference the contexts differ, so later equal "
            f"tokens say nothing.\nexpected {expected}\ncame     {got}"
        )


# --- run.py, on an engine that is not one ---------------------------------------------------------

STUB_VLLM = '''
"""Stands in for vllm: same calls, no engine. Its tokens, blocks and log lines are made up."""
from types import SimpleNamespace as N

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos=False, prompt_logprobs=None):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, quantization, dtype, **settings):
        assert dtype == "float16" and settings["enable_prefix_caching"] is False
        kind = quantization or ("awq" if "AWQ" in model else "base")
        gib, self.bad, blocks = {"base": (0.92, 99, 1000), "fp8": (0.59, 3, 2820),
                                 "awq": (0.43, 1, 3600)}[kind]
        print(f"INFO [gpu_model_runner.py:1] Model loading took {gib} GiB memory and 1.0 seconds")
        if kind == "fp8":
            print("INFO Selected CutlassFP8ScaledMMLinearKernel for Fp8OnlineLinearMethod")
        config = N(hidden_size=896, num_hidden_layers=24, num_attention_heads=14,
                   num_key_value_heads=2, intermediate_size=4864, vocab_size=151936,
                   tie_word_embeddings=True, model_type="qwen2")
        self.llm_engine = N(vllm_config=N(cache_config=N(num_gpu_blocks=blocks, block_size=16),
                                          model_config=N(hf_config=config)))

    def get_tokenizer(self):
        return N(encode=lambda text: list(text.encode())[:20])

    def generate(self, prompts, params, use_tqdm):
        made = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            tokens = [7 + (k >= self.bad) for k in range(params.max_tokens)]
            logprobs = [None] + [{t: N(logprob=-1.5 - 0.01 / self.bad)} for t in ids[1:]]
            made.append(N(outputs=[N(token_ids=tokens)], prompt_logprobs=logprobs))
        return made
'''
STUB_TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda index: "NVIDIA H100 80GB HBM3")
"""


def run_script(lab, *arguments, path=""):
    """run.py on this module's file, in a process of its own: status and output."""
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--file", lab.__file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(path)},
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_run_measures_every_format_beside_its_prediction(lab, tmp_path):
    (tmp_path / "vllm.py").write_text(STUB_VLLM)
    (tmp_path / "torch.py").write_text(STUB_TORCH)
    sizes = ("--batches", "1", "2", "--max-tokens", "5", "--prompt-tokens", "3")
    status, said = run_script(lab, *sizes, path=tmp_path)
    assert status == 0, f"run.py on a stand-in for vllm must end well; it said:\n{said[-3000:]}"
    wanted = (
        "PREDICTED, not measured: 3.35 TB/s",
        "weights: predicted 0.92 GiB, the log says 0.92 GiB",
        "weights: predicted 0.43 GiB, the log says 0.43 GiB",
        "blocks: 2,820 of 16, +1,820 against the base; at most +1,820 expected",
        "CutlassFP8ScaledMMLinearKernel",
        "greedy outputs agree for 3 of 5 tokens",
        "NLL 1.5033 (+0.0032)",
        "of the ceiling",
    )
    for words in wanted:
        assert words in said, f"run.py prints {words!r}; it said:\n{said[-3000:]}"
    assert len(re.findall(r"w4_asym: 2,600 more blocks than bf16", said)) == 0, (
        f"2,600 blocks are below the 2,694 that 4 bits save: no contradiction; it said:\n{said}"
    )
    kept = json.loads(said.splitlines()[-1].removeprefix("RESULT "))
    assert list(kept) == ["bf16", "fp8", "w4_asym"] and len(kept["fp8"]["rates"]["2"]) == 3, (
        f"the last line keeps what was measured, three repeats per batch; came {kept}"
    )


def test_run_predicts_without_a_gpu(lab):
    status, said = run_script(lab, "--predict", "--device", "L4", "--batches", "16")
    assert status == 0 and "PREDICTED, not measured" in said, f"labelled as such; came {said}"
    for words in ("0.458 GB", "2,694 blocks", "16: 10,473", "about 202 tokens"):
        assert words in said, f"Qwen2.5-0.5B on an L4: {words!r}; came\n{said}"


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_real_engine_keeps_to_the_arithmetic(lab, gpu_device):
    pytest.importorskip("vllm")
    model = str(HERE.parents[2] / "models" / "byte-llama")
    status, said = run_script(
        lab, "--model", model, "--awq", "none", "--batches", "1", "8", "--max-tokens", "32",
        "--util", "0.3", path=os.environ.get("PYTHONPATH", ""),
    )  # fmt: skip
    assert status == 0, f"run.py failed:\n{said[-3000:]}"
    assert "IMPOSSIBLE" not in said, f"a measurement above its ceiling:\n{said[-3000:]}"
    kept = json.loads(said.splitlines()[-1].removeprefix("RESULT "))
    shape = lab.ModelShape(**kept["bf16"]["shape"])
    assert shape == byte_llama(lab), f"the engine's config of byte-llama; came {shape}"
    assert "for Fp8OnlineLinearMethod" in said, f"FP8 names the kernel it chose:\n{said[-3000:]}"
