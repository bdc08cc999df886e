"""The folders hold what the pinned tree reads, and the mini engine reads the same from them."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from course.files import load_module

HERE = Path(__file__).resolve().parent


def load(name: str) -> ModuleType:
    return load_module(HERE / f"{name}.py")


serve_packed = load("serve_packed")
packed, heldout = serve_packed.packed, serve_packed.heldout
schemes = packed.schemes


@functools.cache
def little_calibration() -> dict:
    """A few hundred tokens are enough to give every quantizer something to do."""
    (text,) = heldout.library(False, 1).values()
    return {
        name: schemes.Inputs(x[:400], name.split(".")[-1] in packed.NORMS)
        for name, x in heldout.capture(heldout.model(), [text]).items()
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(packed, "calibration", little_calibration)


@functools.cache
def packed_tensors(name: str) -> dict[str, np.ndarray]:
    return packed.pack(packed.RECIPES[name])


@functools.cache
def saved() -> dict:
    return json.loads((HERE / "measured" / "served.json").read_text(encoding="utf-8"))


def layer_sizes(name: str) -> tuple[int, int]:
    """(out_features, in_features) of a layer of the shipped model, from its own file."""
    return packed.shipped()[f"{name}.weight"].shape


# ------------------------------------------------------------------ the folder


EXPECTED = {
    # vllm/model_executor/layers/quantization/auto_gptq.py, AutoGPTQLinearMethod.create_weights
    "gptq": lambda out, inn: {
        "qweight": ((inn // 8, out), np.int32),
        "qzeros": ((inn // 128, out // 8), np.int32),
        "scales": ((inn // 128, out), np.float16),
        "g_idx": ((inn,), np.int32),
    },
    # vllm/model_executor/layers/quantization/cpu_wna16.py, CPUAWQLinearMethod.create_weights
    "awq": lambda out, inn: {
        "qweight": ((inn, out // 8), np.int32),
        "qzeros": ((inn // 128, out // 8), np.int32),
        "scales": ((inn // 128, out), np.float16),
    },
    # .../compressed_tensors/schemes/compressed_tensors_wNa16.py, CompressedTensorsWNA16
    "pack-quantized": lambda out, inn: {
        "weight_packed": ((out, inn // 8), np.int32),
        "weight_scale": ((out, inn // 128), np.float16),
        "weight_shape": ((2,), np.int64),
    },
    # .../compressed_tensors/schemes/compressed_tensors_w8a8_int8.py, CompressedTensorsW8A8Int8
    "int-quantized": lambda out, inn: {
        "weight": ((out, inn), np.int8),
        "weight_scale": ((out, 1), np.float32),
    },
}


@pytest.mark.parametrize("name", packed.RECIPES)
def test_each_linear_layer_has_the_tensors_that_are_registered_for_it(name):
    tensors = packed_tensors(name)
    layers = dict(packed.layers_of(tensors))
    assert len(layers) == 4 * 7, "four layers of seven projections, none of them fused in a file"
    for layer, stored in layers.items():
        expected = EXPECTED[name.split(",")[0]](*layer_sizes(layer))
        assert {k: (a.shape, a.dtype.type) for k, a in stored.items()} == expected, layer


@pytest.mark.upstream
@pytest.mark.parametrize("form", EXPECTED)
def test_the_pinned_tree_registers_these_tensors(form, monkeypatch):
    """`create_weights` of each method, with the choice of a kernel and of a rank taken out."""
    import torch
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.quantization import auto_gptq, cpu_wna16
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_int8 as w8a8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16 as w4a16,
    )

    class NoKernel:
        def __init__(self, *args, **kwargs):
            pass

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    for module in (auto_gptq, w4a16):
        monkeypatch.setattr(module, "choose_mp_linear_kernel", lambda config: NoKernel)
    monkeypatch.setattr(auto_gptq, "verify_marlin_supported", lambda **_: None)
    monkeypatch.setattr(w8a8, "init_int8_linear_kernel", lambda **_: None)
    gptq = auto_gptq.AutoGPTQConfig.from_config(packed.gptq_config(False))
    method = {
        "gptq": lambda: auto_gptq.AutoGPTQLinearMethod(gptq),
        "awq": lambda: cpu_wna16.CPUAWQLinearMethod(
            cpu_wna16.CPUAWQConfig.from_config(packed.AWQ_CONFIG)
        ),
        "pack-quantized": lambda: w4a16.CompressedTensorsWNA16("group", 4, 128),
        "int-quantized": lambda: w8a8.CompressedTensorsW8A8Int8("channel", False, True),
    }[form]()
    layer = torch.nn.Module()
    method.create_weights(
        layer=layer,
        input_size_per_partition=768,
        output_partition_sizes=[256],
        input_size=768,
        output_size=256,
        params_dtype=torch.float16,
        weight_loader=lambda *_: None,
    )
    registered = {
        name: (tuple(tensor.shape), tensor.numpy().dtype.type)
        for name, tensor in (
            (n, p.data.as_subclass(torch.Tensor)) for n, p in layer.named_parameters()
        )
    }
    assert registered == EXPECTED[form](256, 768)


@pytest.mark.parametrize("name", packed.RECIPES)
def test_embedding_and_norms_stay_as_they_are(name):
    tensors, source = packed_tensors(name), packed.shipped()
    others = {key for key in tensors if "_proj." not in key}
    assert others == {key for key in source if "_proj." not in key}
    assert "lm_head.weight" not in tensors, "the head is the embedding"
    changed = {key for key in others if not np.array_equal(tensors[key], source[key])}
    if name == "awq, searched":
        assert changed and all("layernorm" in key for key in changed)
    else:
        assert not changed


def test_a_factor_in_a_norm_leaves_the_product_alone():
    """The norm is divided by what the columns were multiplied with: same outputs, another grid."""
    plain, folded = (packed_tensors(f"awq, {name}") for name in ("zero-points", "searched"))
    moved = [
        (layer, attribute)
        for layer in range(4)
        for attribute, norm in packed.NORMS.items()
        if not np.array_equal(
            *(tensors[f"model.layers.{layer}.{norm}.weight"] for tensors in (plain, folded))
        )
    ]
    assert moved, "a search that moves nothing would test nothing"
    for layer, attribute in moved:
        norm = f"model.layers.{layer}.{packed.NORMS[attribute]}.weight"
        factor = plain[norm].astype(np.float32) / folded[norm].astype(np.float32)
        for part in packed.PARTS[attribute]:
            name = f"model.layers.{layer}.{part}"
            original = packed.shipped()[f"{name}.weight"].astype(np.float32)
            stored = dict(packed.layers_of(folded))[name]
            back = packed.decode(stored, packed.AWQ_CONFIG) / factor
            assert np.linalg.norm(back - original) < 0.15 * np.linalg.norm(original), name


@pytest.mark.parametrize("name", packed.RECIPES)
def test_a_folder_is_read_back_as_what_was_quantized(name, tmp_path):
    """The fused matrix of the quantizer, rounded as the kernel does, is what the engine gets."""
    packed.write(packed_tensors(name), packed.RECIPES[name].config, tmp_path)
    model = packed.load(tmp_path, "float32")
    for number, attribute in ((0, "qkv_proj"), (2, "down_proj"), (3, "gate_up_proj")):
        parts = [f"model.layers.{number}.{part}.weight" for part in packed.PARTS[attribute]]
        whole = np.concatenate([packed.shipped()[part].astype(np.float32) for part in parts])
        inputs = packed.calibration()[f"layers.{number}.{attribute}"]
        coded = packed.RECIPES[name].quantize(whole, inputs)
        codes = coded.codes.astype(np.float32)
        if coded.codes.dtype == np.int8 and name.startswith("int-"):
            expected = codes * coded.scales
        else:
            group = np.arange(codes.shape[1]) // 128 if coded.g_idx is None else coded.g_idx
            zeros = 8 if coded.zeros is None else coded.zeros[:, group]
            expected = (codes - zeros) * coded.scales.astype(np.float32)[:, group]
            expected = expected.astype(np.float16).astype(np.float32)
        linear = getattr(model.layers[number], attribute)
        assert np.array_equal(linear.weight.T, expected), (number, attribute)
        assert isinstance(linear, packed.PerToken) == name.startswith("int-")
    assert not isinstance(model.lm_head, packed.PerToken), "the head reads its inputs as they are"


def test_the_shipped_model_reads_back_as_itself(tmp_path):
    packed.write(packed.shipped(), {}, tmp_path)
    tokens = np.array([heldout.EOS, *b"What is a block?"])
    ours = heldout.logits(packed.load(tmp_path), tokens)
    assert np.array_equal(ours, heldout.logits(heldout.model("float64"), tokens))


def test_an_order_of_its_own_keeps_every_column_in_its_place():
    stored = dict(packed.layers_of(packed_tensors("gptq, reordered")))
    layer = stored["model.layers.2.mlp.down_proj"]
    assert np.bincount(layer["g_idx"]).tolist() == [128] * 6
    assert (np.diff(layer["g_idx"]) < 0).any(), "columns in the file are not in the groups' order"
    original = packed.shipped()["model.layers.2.mlp.down_proj.weight"].astype(np.float32)
    error = np.linalg.norm(packed.decode(layer, packed.gptq_config(True)) - original)
    assert error < 0.25 * np.linalg.norm(original)
    assert np.linalg.norm(packed.decode(layer, packed.gptq_config(False)) - original) > 1.2 * error


def test_the_same_codes_in_two_layouts_are_the_same_matrix():
    gptq, pack = (packed_tensors(f"{form}, nearest") for form in ("gptq", "pack-quantized"))
    for (_, one), (_, other) in zip(packed.layers_of(gptq), packed.layers_of(pack), strict=True):
        matrices = [
            packed.decode(one, packed.gptq_config(False)), packed.decode(other, packed.W4),
        ]  # fmt: skip
        assert np.array_equal(*matrices)


@pytest.mark.upstream
def test_the_pinned_tree_reads_the_configs(tmp_path):
    """Each config object is made from ours, and gives the four decisions we count on."""
    from vllm.model_executor.layers.quantization import auto_gptq, cpu_wna16
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.utils import gptq_utils

    fused = {name: [p.split(".")[1] for p in parts] for name, parts in packed.PARTS.items()}
    fused = {name: parts for name, parts in fused.items() if len(parts) > 1}
    packed.make("gptq, reordered", tmp_path)
    ours = auto_gptq.AutoGPTQConfig.from_config(packed.gptq_config(True))
    assert (ours.weight_bits, ours.group_size, ours.desc_act) == (4, 128, True)
    ours.maybe_update_config(str(tmp_path))
    for name, quantized in (
        ("model.layers.3.self_attn.qkv_proj", True),
        ("model.layers.0.mlp.gate_up_proj", True),
        ("lm_head", False),
        ("model.embed_tokens", False),
    ):
        found = gptq_utils.is_layer_gptq_quantized(name, ours.modules_in_block_to_quantize, fused)
        assert found == quantized, name
    ours = cpu_wna16.CPUAWQConfig.from_config(packed.AWQ_CONFIG)
    assert ours.zero_point and ours.modules_to_not_convert == ["lm_head"]
    for config, scheme in ((packed.W4, "pack-quantized"), (packed.W8, "int-quantized")):
        ours = compressed_tensors.CompressedTensorsConfig.from_config(dict(config))
        assert ours.quant_format == scheme and ours.ignore == ["lm_head"]
        weights = ours.target_scheme_map["Linear"]["weights"]
        inputs = ours.target_scheme_map["Linear"]["input_activations"]
        assert ours._is_wNa16_group_channel(weights, inputs) == (scheme == "pack-quantized")
        assert inputs is None or ours._is_dynamic_token_w8a8(weights, inputs)


# ------------------------------------------------------------------ the mistakes


@pytest.mark.parametrize("name", packed.DAMAGE)
def test_a_mistake_changes_bits_and_nothing_that_is_checked(name):
    """Same names, shapes and dtypes, so that loading sees nothing; one mistake is the exception."""
    base, change = packed.DAMAGE[name]
    sound, config = packed_tensors(base), dict(packed.RECIPES[base].config)
    wrong, said = dict(sound), dict(config)
    change(wrong, said)
    assert (said != config) != any(not np.array_equal(wrong[k], sound[k]) for k in sound)
    kinds = [{k: (a.shape, a.dtype) for k, a in tensors.items()} for tensors in (sound, wrong)]
    assert (kinds[0] == kinds[1]) == (name != "gptq with scales transposed")
    assert all(np.array_equal(packed_tensors(base)[k], sound[k]) for k in sound), "no side effect"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("awq in standard order", 1.0, 2.0),
        ("gptq without the bias", 1.0, 9.0),
        ("gptq reshaped, not transposed", 1.0, 2.0),
        ("awq with zeros less one", 0.3, 1.5),
        ("gptq with zeros as they are", 0.0, 0.2),
        ("reordered, and not said", 0.15, 0.6),
    ],
)
def test_how_far_a_mistake_moves_a_matrix(name, least, most):
    """Relative error of one matrix against the original, between the bounds."""
    base, change = packed.DAMAGE[name]
    tensors, config = dict(packed_tensors(base)), dict(packed.RECIPES[base].config)
    change(tensors, config)
    layer = "model.layers.1.mlp.down_proj"
    original = packed.shipped()[f"{layer}.weight"].astype(np.float32)
    back = packed.decode(dict(packed.layers_of(tensors))[layer], config)
    assert least <= np.linalg.norm(back - original) / np.linalg.norm(original) <= most


def test_a_name_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no recipe 'gguf'; there are gptq, nearest"):
        packed.make("gguf", tmp_path)


# ------------------------------------------------------------------ reading the log


LOG = """
(Worker pid=7) INFO 01-01 00:00:00 [auto_gptq.py:353] Using CPUWNA16LinearKernel for AutoGPTQ
INFO [core.py:109] Initializing a V1 LLM engine with config: model='x', quantization=auto_gptq,
(Worker pid=7) INFO Using CPUWNA16LinearKernel for AutoGPTQ
(Worker pid=7) ERROR Traceback (most recent call last):
(Worker pid=7) ERROR   File "/somewhere/vllm/v1/worker/cpu_worker.py", line 9, in load_model
(Worker pid=7) ERROR   File "/somewhere/vllm/model_executor/parameter.py", line 175, in load
(Worker pid=7) ERROR     assert param_data.shape == loaded_weight.shape
(Worker pid=7) ERROR AssertionError
  File "/somewhere/vllm/entrypoints/llm.py", line 3, in __init__
RuntimeError: Engine core initialization failed.
"""


def test_a_log_names_kernels_and_the_first_error_with_its_place():
    assert serve_packed.kernels_of(LOG) == ["CPUWNA16LinearKernel for AutoGPTQ"]
    assert serve_packed.METHOD.search(LOG)[1] == "auto_gptq"
    assert serve_packed.refusal_of(LOG) == {
        "refused": "AssertionError",
        "at": "vllm/model_executor/parameter.py:175 load",
    }
    assert serve_packed.refusal_of("INFO all went well") is None


# ------------------------------------------------------------------ the comparison


@pytest.fixture
def two_questions(monkeypatch):
    monkeypatch.setattr(serve_packed, "texts", lambda: {"probe": b"Return the number of blocks."})
    monkeypatch.setattr(serve_packed, "prompts", lambda: [b"The scheduler ", b"If a block "])
    monkeypatch.setattr(serve_packed, "MAX_TOKENS", 6)
    serve_packed.exact_scores.cache_clear()
    yield
    serve_packed.exact_scores.cache_clear()


def test_the_comparison_finds_what_differs(two_questions):
    model = heldout.model("float64")
    ours = serve_packed.ask_mini(model)
    theirs = json.loads(json.dumps(ours)) | {"gaps": [[0.5] * 6] * 2}
    same = serve_packed.compare(model, ours, theirs)
    assert same["parted"] == [] and same["apart"]["worst"] == 0
    assert same["bits"] == same["mini_bits"]
    assert sum(same["bits"].values()) == pytest.approx(
        heldout.bits_of(model, b"Return the number of blocks."), abs=1e-3
    )
    theirs["tokens"][1][3] = 35
    theirs["scores"]["probe"][5] -= 0.25
    other = serve_packed.compare(model, ours, theirs)
    (parted,) = other["parted"]
    assert (parted["prompt"], parted["token"], parted["vllm_gap"]) == (1, 3, 0.5)
    assert parted["mini_gap"] > 0, "the mini engine's own token was its likeliest"
    assert other["apart"]["worst"] == pytest.approx(0.25)
    assert other["answers"] != same["answers"]


def test_there_are_32_prompts_and_each_text_fits_a_window():
    assert len(serve_packed.prompts()) == 32 == len(set(serve_packed.prompts()))
    assert max(map(len, serve_packed.texts().values())) == 511


# ------------------------------------------------------------------ the committed run


FOUR_BITS = [name for name in packed.RECIPES if name != "int-quantized, W8A8"]


def test_every_row_was_served_or_refused():
    rows = saved()["rows"]
    assert list(rows) == list(serve_packed.ROWS)
    refused = {name for name, row in rows.items() if "refused" in row}
    assert refused == {
        "gptq, nearest, float32",
        "pack-quantized, nearest, float32",
        "gptq with scales transposed",
    }
    assert saved()["machine"]["vllm"].startswith("0.22.1")
    assert len(serve_packed.table(saved()).splitlines()) == len(rows) + 1


@pytest.mark.parametrize("name", FOUR_BITS)
def test_a_4_bit_layer_adds_nothing_to_what_float16_does(name):
    """The unquantized model sets the tolerance; what quantization moves is a hundred times it."""
    row, base = saved()["rows"][name], saved()["rows"][serve_packed.BASE]
    assert row["apart"]["median"] < 1.25 * base["apart"]["median"]
    assert row["moved"] > 50 * row["apart"]["median"]
    sizes = saved()["text"]["sizes"]
    both = [serve_packed.per_byte(row, which, sizes) for which in ("bits", "mini_bits")]
    assert both[0] == pytest.approx(both[1], abs=3e-4)
    assert all(each["mini_gap"] < 0.01 for each in row["parted"]), "texts part at ties only"


def test_rounding_inputs_makes_small_differences_large():
    rows = saved()["rows"]
    names = serve_packed.BASE, "int-quantized, W8A8", "int-quantized, W8A8, float32"
    base, half, single = (rows[name]["apart"] for name in names)
    assert half["median"] > 10 * base["median"]
    assert single["median"] < base["median"] / 10 and single["worst"] > base["worst"]


def test_equal_numbers_in_another_layout_are_equal_to_the_last_bit():
    rows = saved()["rows"]
    answers = {name: row["answers"] for name, row in rows.items() if "answers" in row}
    same = {name for name in answers if answers[name] == answers["gptq, nearest"]}
    assert same == {"gptq, nearest", "pack-quantized, nearest", "gptq with zeros as they are"}


def test_what_the_pages_say_of_the_mistakes_holds():
    rows, sizes = saved()["rows"], saved()["text"]["sizes"]
    bits = {
        name: [serve_packed.per_byte(rows[name], which, sizes) for which in ("bits", "mini_bits")]
        for name in packed.DAMAGE
        if "refused" not in rows[name]
    }
    harmless, fluent = "gptq with zeros as they are", "reordered, and not said"
    overflown = {"gptq without the bias", "awq with zeros less one"}
    assert {name for name, (theirs, _) in bits.items() if theirs < 3} == {harmless, fluent}
    assert {name for name, (theirs, _) in bits.items() if np.isnan(theirs)} == overflown
    for name in overflown:
        assert set(rows[name]["text"]) == {"\0"}, "token 0 is the first of equals that are NaN"
        wide = rows[f"{name}, bfloat16"]
        assert 6 < serve_packed.per_byte(wide, "bits", sizes) < 8
        assert "nan" in rows[name] and "nan" not in wide
    for name in overflown:
        del bits[name]
    for name, (theirs, ours) in bits.items():
        assert theirs == pytest.approx(ours, abs=0.01), name
    nearest, shipped, told = (
        serve_packed.per_byte(rows[name], "bits", sizes)
        for name in ("gptq, nearest", serve_packed.BASE, "gptq, reordered")
    )
    assert told < nearest and bits[fluent][0] - shipped > 3 * (nearest - shipped)
    assert max(bits, key=lambda name: bits[name][0]) == "awq in standard order"
    assert bits["awq in standard order"][0] > np.log2(257), "worse than knowing nothing"


@pytest.mark.parametrize("name", ["gptq, nearest", "awq in standard order", "int-quantized, W8A8"])
def test_a_committed_file_reads_again_with_the_same_bits(name, tmp_path):
    """A file that older and newer Pythons share word for word, in the mini engine."""
    file = "stdlib/encodings/cp852.py"
    text = serve_packed.texts().get(file, b"")
    if len(text) != saved()["text"]["sizes"][file]:
        pytest.skip(f"this Python's {file} differs from the one measured")
    packed.make(name, tmp_path)
    row = saved()["rows"][name]
    assert (tmp_path / "model.safetensors").stat().st_size == row["bytes"]
    model = packed.load(tmp_path)
    assert heldout.bits_of(model, text) == pytest.approx(row["mini_bits"][file], abs=2e-3)


@pytest.mark.slow
def test_vllm_serves_a_packed_folder(two_questions, tmp_path):
    """Live: needs vLLM's CPU build, with its two libraries in LD_PRELOAD."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm._C") is None:
        pytest.skip("needs vllm==0.22.1 as it is installed, not its source tree alone")
    if not os.environ.get("LD_PRELOAD"):
        pytest.skip("the CPU build wants its two libraries in LD_PRELOAD")
    row, versions = serve_packed.measure("gptq, nearest", tmp_path)
    assert versions["vllm"].startswith("0.22.1")
    assert row["log"] == ["CPUWNA16LinearKernel for AutoGPTQLinearMethod"]
    assert row["apart"]["worst"] < 0.1
