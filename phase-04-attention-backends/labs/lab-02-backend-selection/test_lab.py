"""What lab 04-02 pins: the real selector's choice, all of its reasons in order, and its words."""

from __future__ import annotations

import ast
import itertools
import os
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from course.files import load_module
from labkit import processes

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def _load_recorded():
    return load_module(HERE / "recorded.py", "lab_04_02_recorded")


recorded = _load_recorded()


def config(lab, **asked):
    return lab.SelectorConfig(**{"head_size": 128, "dtype": "bfloat16", **asked})


def mla(lab, **asked):
    return config(lab, **{"head_size": 576, "use_mla": True, **asked})


def refused(lab, *arguments, **more):
    """The text of the ValueError of select_backend; fails where there is none."""
    try:
        got = lab.select_backend(*arguments, **more)
    except ValueError as error:
        return str(error)
    pytest.fail(f"expected a ValueError from select_backend, came {got}", pytrace=False)


# --- Part A ---------------------------------------------------------------------------------------


def test_reasons_are_complete_and_ordered(lab):
    asked = config(lab, head_size=64)
    expected = ["head_size not supported", "non-MLA not supported"]
    got = lab.validate_configuration("FLASHMLA", asked, lab.Device((9, 0)))
    assert got == expected, (
        "FLASHMLA for an ordinary layer with heads of 64 on 9.0: it has no such head size, and it "
        f"is an MLA backend.\nexpected {expected}\ncame     {got}"
    )
    expected += [
        "compute capability not supported",
        "FlashMLA Dense is only supported on Hopper devices.",
    ]
    got = lab.validate_configuration("FLASHMLA", asked, lab.Device((8, 9)))
    assert got == expected, (
        "the same on 8.9: all four reasons, in the order in which they are checked. A user who is "
        f"told one reason at a time starts the engine four times.\nexpected {expected}\n"
        f"came     {got}"
    )
    got = lab.validate_configuration("FLASH_ATTN", config(lab), lab.Device((9, 0)))
    assert got == [], f"FLASH_ATTN, bf16, heads of 128 on 9.0: no reason, []; came {got}"


def test_flash_attention_versions(lab):
    cases = (
        ((7, 5), True, False, None, "version 2 needs 8.0"),
        ((8, 0), True, False, 2, "Ampere"),
        ((9, 0), True, False, 3, "Hopper, also when the wheel has version 4"),
        ((10, 0), True, False, 4, "Blackwell"),
        ((10, 0), False, False, 2, "Blackwell without version 4; 3 runs on 9.x only"),
        ((10, 0), True, True, 2, "batch invariance turns 4 into 2"),
        ((9, 0), True, True, 3, "batch invariance leaves 3"),
        ((10, 3), True, False, 4, "B300, of the same family"),
        ((11, 0), True, False, 2, "11.x is not 10.x"),
        ((12, 0), True, False, 2, "12.x is not 10.x"),
    )
    for capability, fa4, invariant, expected, why in cases:
        got = lab.flash_attn_version(lab.Device(capability, fa4), invariant)
        assert got == expected, (
            f"capability {capability}, fa4={fa4}, batch_invariant={invariant}: {why}.\n"
            f"expected {expected}\ncame     {got}"
        )


def test_head_sizes_of_flash_attention(lab):
    hopper, ada, old_wheel = (
        lab.Device((9, 0)),
        lab.Device((8, 9)),
        lab.Device((9, 0), fa4=False),
    )
    cases = (
        ("FLASH_ATTN", 80, ada, True, "80 and 96 are multiples of 8: no list, a rule"),
        ("FLASH_ATTN", 100, hopper, False, "100 is not a multiple of 8"),
        ("FLASH_ATTN", 256, ada, True, "256 is the last one for everybody"),
        ("FLASH_ATTN", 512, ada, False, "above 256 needs version 4, which cannot run on 8.x"),
        ("FLASH_ATTN", 512, hopper, True, "version 4 can run on 9.x, though 3 is the default"),
        ("FLASH_ATTN", 512, lab.Device((11, 0)), True, "version 4 can run on 11.x too"),
        ("FLASH_ATTN", 512, lab.Device((12, 0)), False, "and on 12.x it cannot"),
        ("FLASH_ATTN", 512, old_wheel, False, "a wheel without version 4"),
        ("TRITON_ATTN", 100, ada, True, "32 and more"),
        ("TRITON_ATTN", 16, ada, False, "32 and more"),
        ("FLASHINFER", 80, hopper, False, "its list has 64, 128, 256 and 512"),
        ("FLEX_ATTENTION", 16, hopper, True, "an empty list is any size"),
    )
    for name, size, device, expected, why in cases:
        got = lab.supports_head_size(name, size, device)
        assert got is expected, (
            f"{name}, heads of {size}, {device.capability}: {why}.\n"
            f"expected {expected}\ncame     {got}"
        )


def test_block_sizes_are_divisors(lab):
    cases = (
        ("FLASH_ATTN", 48, True, "16 divides 48"),
        ("FLASHMLA", 128, True, "64 divides 128: the kernel reads a page as two of its own"),
        ("FLASHMLA", 16, False, "64 does not divide 16"),
        ("FLASHINFER", 48, True, "16 divides 48; one divisor is enough"),
        ("CUTLASS_MLA", 64, False, "128 does not divide 64"),
        ("FLASH_ATTN", 8, False, "16 does not divide 8"),
        ("CUTLASS_MLA", None, True, "the user gave none: the backend sets the page later"),
    )
    for name, size, expected, why in cases:
        got = lab.supports_block_size(name, size)
        assert got is expected, (
            f"{name}, --block-size {size}: {why}.\nexpected {expected}\ncame     {got}"
        )


def test_both_bounds_of_the_capability_count(lab):
    cases = (
        ("FLASHINFER", (7, 2), True, "the lowest is 7.5"),
        ("FLASHINFER", (7, 5), False, "a T4 is the lowest"),
        ("FLASHINFER", (12, 1), False, "a GB10 is the highest"),
        ("FLASHINFER", (12, 2), True, "the highest is 12.1"),
        ("FLASH_ATTN", (12, 1), False, "8.0 and no highest"),
        ("FLASHMLA", (10, 3), False, "the highest is 10.99, for any 10.x"),
        ("FLASHMLA", (11, 0), True, "the highest is 10.99"),
        ("TRITON_ATTN", (7, 0), False, "no bounds"),
    )
    for name, capability, expected, why in cases:
        reasons = lab.validate_configuration(name, config(lab), lab.Device(capability)) or []
        got = "compute capability not supported" in reasons
        assert got is expected, (
            f"{name} on {capability}: {why}. Bounds are pairs and both are included.\n"
            f"expected {'rejected' if expected else 'not rejected'} for its compute capability\n"
            f"came     {reasons}"
        )


@pytest.mark.slow
def test_recorded_reasons(lab):
    for asked in recorded.questions():
        said = recorded.reasons_difference(lab, asked)
        if said:
            pytest.fail(said, pytrace=False)


# --- Part B ---------------------------------------------------------------------------------------

DEVICES = ((8, 0), (8, 9), (9, 0), (10, 0))
FA, FI, TRITON = "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"
MATRIX = {
    "head 128": ({}, (FA, FA, FA, FI)),
    "head 64": ({"head_size": 64}, (FA, FA, FA, FI)),
    "head 80": ({"head_size": 80}, (FA, FA, FA, FA)),
    "head 100": ({"head_size": 100}, (TRITON,) * 4),
    "head 512": ({"head_size": 512}, (FI, FI, FA, FI)),
    "fp32": ({"dtype": "float32"}, (TRITON,) * 4),
    "fp32, head 16": ({"dtype": "float32", "head_size": 16}, ("FLEX_ATTENTION",) * 4),
    "KV fp8": ({"kv_cache_dtype": "fp8"}, (FI, FI, FA, FI)),
    "KV fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, (FI, FI, FI, FI)),
    "KV int8": ({"kv_cache_dtype": "int8_per_token_head"}, (TRITON,) * 4),
    "sinks": ({"has_sink": True, "head_size": 64}, (TRITON, TRITON, FA, FI)),
    "mm_prefix": ({"use_mm_prefix": True, "head_size": 256}, (TRITON,) * 4),
    "batch-invariant": ({"use_batch_invariant": True}, (FA, FA, FA, FA)),
    "MLA": (
        {"use_mla": True, "head_size": 576},
        ("TRITON_MLA", "TRITON_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA"),
    ),
    "MLA, KV fp8": (
        {"use_mla": True, "head_size": 576, "kv_cache_dtype": "fp8"},
        ("TRITON_MLA", "TRITON_MLA", "FLASHMLA", "FLASHINFER_MLA"),
    ),
    "MLA, sparse": (
        {"use_mla": True, "use_sparse": True, "head_size": 576},
        ("", "", "FLASHMLA_SPARSE", "FLASHMLA_SPARSE"),
    ),
}


@pytest.mark.parametrize("row", MATRIX)
def test_matrix_row(lab, row):
    asked, expected = MATRIX[row]
    for capability, name in zip(DEVICES, expected, strict=True):
        try:
            chosen = lab.select_backend(config(lab, **asked), lab.Device(capability))
            got = chosen.name if chosen else None
        except ValueError:
            got = ""
        assert got == name, (
            f"{row} on {capability[0]}.{capability[1]}: {asked or 'bf16, nothing special'}.\n"
            f"expected {name or 'a ValueError'}\ncame     {got or 'a ValueError'}"
        )


def test_few_heads_turn_the_sparse_pair(lab):
    device = lab.Device((10, 0))
    cases = (
        ({}, None, "FLASHMLA_SPARSE", "heads unknown"),
        ({}, 17, "FLASHMLA_SPARSE", "17 heads"),
        ({}, 16, "FLASHINFER_MLA_SPARSE", "16 heads: FlashMLA would pad them"),
        ({"kv_cache_dtype": "fp8"}, 128, "FLASHINFER_MLA_SPARSE", "a quantized cache"),
        ({"kv_cache_dtype": "bfloat16"}, 128, "FLASHMLA_SPARSE", "a cache that is not quantized"),
    )
    for more, heads, expected, why in cases:
        order = lab.priorities(mla(lab, use_sparse=True, **more), device, heads) or []
        got = [name for name in order if name.endswith("SPARSE")][:1]
        assert got == [expected], (
            f"sparse MLA on 10.0, num_heads={heads}: {why}.\nexpected first of the two sparse "
            f"backends: {expected}\ncame: {got}"
        )
    asked, hopper = mla(lab, use_sparse=True), lab.Device((9, 0))
    got, expected = (lab.priorities(asked, hopper, heads) for heads in (4, None))
    assert got == expected, (
        "sparse MLA on 9.0, 4 heads: one sparse backend is asked there, and nothing turns.\n"
        f"expected {expected}\ncame     {got}"
    )


def test_a_family_has_one_order(lab):
    for asked, expected in ((config(lab), FI), (config(lab, has_sink=True), FI)):
        for capability in ((10, 0), (10, 3)):
            chosen = lab.select_backend(asked, lab.Device(capability))
            assert chosen and chosen.name == expected, (
                f"{asked} on {capability}: B200 and B300 are 10.0 and 10.3, one family with one "
                "order and the same TRT-LLM kernels. Only the major number counts.\n"
                f"expected {expected}\ncame     {chosen and chosen.name}"
            )


@pytest.mark.slow
def test_recorded_choices(lab):
    for asked in recorded.questions():
        said = recorded.choice_difference(lab, asked)
        if said:
            pytest.fail(said, pytrace=False)


def test_no_valid_backend_raises(lab):
    got = refused(lab, config(lab, block_size=8), lab.Device((9, 0)))
    expected = (
        "No valid attention backend found for cuda with AttentionSelectorConfig(head_size=128, "
        "dtype=torch.bfloat16, kv_cache_dtype=auto, block_size=8, use_mla=False, has_sink=False, "
        "use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, "
        "attn_type=AttentionType.DECODER, use_non_causal=False, use_batch_invariant=False). "
        "Reasons: {FLASH_ATTN: [block_size not supported], FLASHINFER: [block_size not supported], "
        "TRITON_ATTN: [block_size not supported], FLEX_ATTENTION: [block_size not supported], "
        "TURBOQUANT: [kv_cache_dtype not supported, block_size not supported]}."
    )
    assert got == expected, (
        "blocks of 8: no backend's size divides 8, and the error lists everybody's reasons, so "
        f"that the common one can be seen.\nexpected {expected}\ncame     {got}"
    )


def test_override_is_validated_not_trusted(lab):
    got = refused(lab, config(lab, head_size=64), lab.Device((8, 9)), "FLASHMLA")
    expected = (
        "Selected backend AttentionBackendEnum.FLASHMLA is not valid for this configuration. "
        "Reason: ['head_size not supported', 'non-MLA not supported', 'compute capability not "
        "supported', 'FlashMLA Dense is only supported on Hopper devices.']"
    )
    assert got == expected, (
        "--attention-backend FLASHMLA for an ordinary model on an L4: the override is checked like "
        f"any candidate.\nexpected {expected}\ncame     {got}"
    )
    got = refused(lab, mla(lab, block_size=16), lab.Device((9, 0)), "FLASHMLA")
    assert got.endswith("Reason: ['block_size not supported']"), (
        "FLASHMLA by name with blocks of 16: a block size is a reason like any other, and whoever "
        f"gave both has to take one back; came {got}"
    )
    got = refused(lab, config(lab), lab.Device((9, 0)), "CUTLASS_MLA")
    assert "Reason: ['head_size not supported', 'non-MLA not supported', 'compute" in got, (
        "CUTLASS_MLA is not in the priority list of this layer, but it has an entry in BACKENDS: "
        f"its own reasons are the answer; came {got}"
    )


def test_no_silent_fallback_on_override(lab):
    got = refused(lab, config(lab, dtype="float32"), lab.Device((9, 0)), "FLASHINFER")
    assert "AttentionBackendEnum.FLASHINFER is not valid" in got and "dtype" in got, (
        "FLASHINFER by name, for float32, which TRITON_ATTN could serve: an error, not another "
        f"backend. Whoever names a backend wants to know.\ncame {got}"
    )
    chosen = lab.select_backend(config(lab), lab.Device((9, 0)), "TRITON_ATTN")
    expected = ("TRITON_ATTN", ["TRITON_ATTN"], {})
    assert chosen and tuple(chosen)[:3] == expected, (
        "a valid override below others in the list wins, and nobody else is asked.\n"
        f"expected {expected}\ncame     {chosen and tuple(chosen)[:3]}"
    )


def test_unknown_override_lists_options(lab):
    got = refused(lab, config(lab), lab.Device((9, 0)), "FLASH_ATTENTION")
    expected = (
        "Unknown attention backend: 'FLASH_ATTENTION'. Valid options are: "
        "FLASH_ATTN, FLASH_ATTN_DIFFKV, TRITON_ATTN, ROCM_ATTN"
    )
    assert got.startswith(expected) and got.endswith("CPU_ATTN, TURBOQUANT, CUSTOM"), (
        "a name that no platform has: the error lists MEMBERS, in their order.\n"
        f"expected {expected}, ... CPU_ATTN, TURBOQUANT, CUSTOM\ncame     {got}"
    )
    got = refused(lab, config(lab), lab.Device((9, 0)), "flash_attention")
    assert got.startswith(expected), (
        "the same in small letters: the name is put into capitals before it is looked up, and "
        f"comes back so.\nexpected {expected}, ...\ncame     {got}"
    )
    got = refused(lab, config(lab), lab.Device((9, 0)), "ROCM_ATTN")
    assert got.endswith("Reason: ['ImportError']"), (
        "ROCM_ATTN is a member, so not unknown, and has no entry in BACKENDS: it counts as not "
        f"importable here; came {got}"
    )


def test_override_in_any_case(lab):
    cases = (("flashinfer", "FLASHINFER"), ("Triton_Attn", TRITON), ("auto", FA), ("Auto", FA))
    for override, expected in cases:
        chosen = lab.select_backend(config(lab), lab.Device((9, 0)), override)
        assert chosen and chosen.name == expected, (
            f"--attention-backend {override}: names may be small, and auto, in any case, is as if "
            f"nothing were given.\nexpected {expected}\ncame     {chosen and chosen.name}"
        )


def test_block_size_warning_only_when_sole_reason(lab):
    device = lab.Device((9, 0))
    chosen = lab.select_backend(mla(lab, kv_cache_dtype="fp8", block_size=16), device)
    expected = (
        "--block-size 16 precluded higher-priority backend(s) FLASHMLA. Using TRITON_MLA instead, "
        "which may result in reduced performance. Consider removing --block-size to auto-select "
        "the optimal block size."
    )
    assert chosen and chosen.warning == expected, (
        "MLA with an fp8 cache and blocks of 16 on 9.0: FLASHMLA lost by the block size alone. "
        "FLASHINFER_MLA would not run on 9.0 with any block size, so it is not named.\n"
        f"expected {expected!r}\ncame     {chosen and chosen.warning!r}"
    )
    chosen = lab.select_backend(mla(lab, block_size=16), lab.Device((10, 0)))
    expected = "--block-size 16 precluded higher-priority backend(s) FLASHINFER_MLA, CUTLASS_MLA. "
    assert chosen and chosen.warning.startswith(expected), (
        "MLA with blocks of 16 on 10.0: two better backends had no other reason, and both are "
        "named, in order of priority, separated by a comma and a space.\n"
        f"expected {expected!r}...\ncame     {chosen and chosen.warning!r}"
    )
    silent = (
        (mla(lab, kv_cache_dtype="fp8", block_size=64), "blocks of 64 suit FLASHMLA"),
        (mla(lab, kv_cache_dtype="fp8"), "no block size was given"),
        (mla(lab, block_size=16), "FLASHMLA lost nothing: FLASH_ATTN_MLA is above it and valid"),
    )
    for asked, why in silent:
        chosen = lab.select_backend(asked, device)
        assert chosen and chosen.warning == "", (
            f"{asked}: {why}.\nexpected ''\ncame     {chosen and chosen.warning!r}"
        )


def test_log_line_format(lab):
    chosen = lab.select_backend(config(lab), lab.Device((9, 0)))
    expected = (
        "Using FLASH_ATTN attention backend out of potential backends: "
        "['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', 'FLEX_ATTENTION']."
    )
    assert chosen and chosen.log_line == expected, (
        "the automatic choice names the valid backends in order of priority.\n"
        f"expected {expected}\ncame     {chosen and chosen.log_line}"
    )
    chosen = lab.select_backend(config(lab), lab.Device((9, 0)), "FLASHINFER")
    expected = "Using AttentionBackendEnum.FLASHINFER backend."
    assert chosen and chosen.log_line == expected, (
        "an override has another line, and the name has its enum in front.\n"
        f"expected {expected}\ncame     {chosen and chosen.log_line}"
    )


def test_sliding_window_is_not_an_input(lab):
    chosen = lab.select_backend(config(lab), lab.Device((9, 0)))
    names = {field.name for field in fields(lab.SelectorConfig)}
    absent = {"sliding_window", "alibi_slopes", "logits_soft_cap", "num_kv_heads"}
    assert chosen and chosen.name == FA and not names & absent, (
        "a window, ALiBi, a soft cap: the selector never hears of them, so two layers that differ "
        f"in nothing else get the same backend; came {chosen and chosen.name}, fields "
        f"{sorted(names & absent)}"
    )


def test_cpu_ignores_override(lab):
    cases = (
        (None, "", "nothing was asked for, nothing is said"),
        ("CPU_ATTN", "", "this is what it gets anyway"),
        ("FLASH_ATTN", "Cannot use AttentionBackendEnum.FLASH_ATTN backend on CPU.", "a log line"),
        ("Auto", "", "auto, in any case, is as if nothing were given"),
        ("cpu_attn", "", "small letters are fine"),
        ("flashinfer", "Cannot use AttentionBackendEnum.FLASHINFER backend on CPU.", "in capitals"),
    )
    for override, line, why in cases:
        chosen = lab.select_cpu(config(lab, head_size=100, block_size=8), override)
        got = chosen and (chosen.name, chosen.valid, chosen.rejected, chosen.log_line)
        expected = ("CPU_ATTN", ["CPU_ATTN"], {}, line)
        assert got == expected, (
            f"on the CPU platform with override {override}: {why}, no error and no validation.\n"
            f"expected {expected}\ncame     {got}"
        )
    for more, words in (
        ({"use_mla": True, "use_sparse": True}, "MLA is not supported on CPU."),
        ({"use_sparse": True}, "Sparse Attention is not supported on CPU."),
    ):
        try:
            got = lab.select_cpu(config(lab, **more))
        except NotImplementedError as error:
            got = str(error)
        assert got == words, (
            f"{more} on the CPU platform: a NotImplementedError.\nexpected {words}\ncame     {got}"
        )


@pytest.mark.slow
def test_a_wide_sample_of_the_recording(lab):
    for asked in itertools.islice(recorded.questions(whole=True), 5, None, 37):
        said = recorded.difference(lab, asked)
        if said:
            pytest.fail(said, pytrace=False)


# --- Part C ---------------------------------------------------------------------------------------


def test_the_backend_of_a_log(lab):
    prefix = "(EngineCore pid=7) INFO 01-01 00:00:00 [cuda.py:378] "
    auto = prefix + "Using TRITON_MLA attention backend out of potential backends: ['TRITON_MLA']."
    forced = "INFO 01-01 00:00:00 [cuda.py:318] Using AttentionBackendEnum.FLASHINFER backend.\n"
    version = prefix + "Using FlashAttention version 3"
    cases = (
        ([auto], "TRITON_MLA", "the automatic choice"),
        ([forced], "FLASHINFER", "an override: without its AttentionBackendEnum"),
        ([auto, version, forced], "FLASHINFER", "two starts in one file: the last one counts"),
        ([forced, version, auto], "TRITON_MLA", "the last one, of whichever kind"),
        ([auto.removeprefix(prefix)], "TRITON_MLA", "nothing in front of it"),
        ([version], None, "the version of a kernel library is no choice of a backend"),
        (["Cannot use AttentionBackendEnum.FLASH_ATTN backend on CPU."], None, "a refusal"),
        (["INFO Using Flash Attention backend."], None, "no line of this version on CUDA"),
        (
            ["WARNING Unknown vLLM environment variable detected: VLLM_ATTENTION_BACKEND", auto],
            "TRITON_MLA",
            "a variable that no longer exists chooses nothing",
        ),
    )
    for lines, expected, why in cases:
        got = lab.read_backend(lines)
        assert got == expected, (
            f"{why}:\n{chr(10).join(lines)}\nexpected {expected}\ncame     {got}"
        )


# --- the real one ---------------------------------------------------------------------------------


def test_the_names_are_those_of_the_pinned_tree(lab):
    lab.select_backend(config(lab), lab.Device((9, 0)))
    registry = ROOT / "upstream/vllm/v1/attention/backends/registry.py"
    if not registry.is_file():
        pytest.skip("the pinned tree is not here: course upstream fetch")
    tree = ast.parse(registry.read_text(encoding="utf-8"))
    enum = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AttentionBackendEnum"
    )
    expected = [n.targets[0].id for n in enum.body if isinstance(n, ast.Assign)]
    got = refused(lab, config(lab), lab.Device((9, 0)), "NONE").split("are: ")[-1].split(", ")
    assert got == expected, (
        f"the options of the error are the members of the pinned enum.\nexpected {expected}\n"
        f"came     {got}"
    )


def in_a_process(*arguments):
    """run.py in a process of its own."""
    return processes.start(
        [str(HERE / "run.py"), *arguments], env={**os.environ, "VLLM_BATCH_INVARIANT": "0"}
    )


@cache
def real_answers(capability):
    """What the pinned selector says: the same for every file that is graded here."""
    return in_a_process("--answers", capability).needed()["reals"]


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0"])
def test_the_real_selector_in_its_own_words(lab, capability, capsys):
    run = load_module(HERE / "run.py")
    differ = run.probe(lab, run.simulated(lab, capability), real_answers(capability))
    said = capsys.readouterr().out
    assert differ == 0 and "layers: 0 differ" in said, (
        "run.py asks the pinned selector about the layers of CASES on a simulated "
        f"{capability} and compares names, lines, warnings and errors:\n{said[-3000:]}"
    )


@pytest.mark.gpu
def test_the_selector_on_this_gpu(lab, gpu_device):
    pytest.importorskip("vllm")
    ran = in_a_process("--file", lab.__file__, "--probe")
    said = ran.text
    assert ran.status == 0 and "layers: 0 differ" in said, (
        f"run.py --probe compares the real selector here with your predictions:\n{said[-3000:]}"
    )
