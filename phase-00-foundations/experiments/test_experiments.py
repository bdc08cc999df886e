"""The measurements' arithmetic, and one tiny run of each; no assertion on any time."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from course.files import load_module
from mini_vllm.models.transformer import ModelConfig, Transformer

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    return load_module(HERE / f"{name}.py")


roofline = load("measure_roofline")
kv_cache = load("measure_kv_cache")


def tiny_model(**parts: Any) -> Transformer:
    """One layer, random weights, bytes as tokens; `parts` replace attention or linear layers."""
    config = ModelConfig(257, 16, 24, 1, 2, 1, 8, 64)
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (257, 16),
        "model.norm.weight": (16,),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.mlp.gate_proj.weight": (24, 16),
        "model.layers.0.mlp.up_proj.weight": (24, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 24),
    }
    weights = {name: rng.normal(size=shape) * 0.3 for name, shape in shapes.items()}
    return Transformer(config, weights, "float64", **parts)


MEASUREMENT = {
    "machine": {"cpu": "a CPU", "cores": 2},
    "threads": 2,
    "numpy": "2.0.0",
    "size": 1000,
    "copies": 1,
    "mem_bw": 10e9,
    "peak_flops": 200e9,
    "points": [
        {"columns": 1, "seconds": 4e-4},
        {"columns": 2, "seconds": 8e-4},
        {"columns": 8, "seconds": 8e-4},
        {"columns": 256, "seconds": 26e-4},
    ],
}


@pytest.mark.parametrize(
    ("columns", "expected"), [(1, 4e-4), (40, 4e-4), (80, 8e-4), (256, 2.56e-3)]
)
def test_prediction_is_flat_until_the_ridge_then_linear(columns, expected):
    assert roofline.predict_seconds(1000, columns, 200e9, 10e9) == pytest.approx(expected)


def test_summary_finds_the_predicted_and_the_measured_ridge():
    got = roofline.summarise(MEASUREMENT)
    assert (got["ridge"], got["ridge_columns"]) == (20.0, 40.0)
    assert got["measured_columns"] == pytest.approx(80.0)
    assert [round(p["ratio"], 3) for p in got["points"]] == [1.0, 2.0, 2.0, 1.016]


def test_summary_has_a_json_form():
    assert json.loads(json.dumps(roofline.summarise(MEASUREMENT)))["ridge"] == 20.0


def test_roofline_figure_is_well_formed_and_names_the_machine():
    pytest.importorskip("matplotlib", reason="plots need the figures extra")
    root = ElementTree.fromstring(roofline.figure(MEASUREMENT))
    assert any("a CPU, 2 thread(s)" in (node.text or "") for node in root.iter())


def test_roofline_measures_something_on_any_machine(tmp_path, capsys):
    roofline.main(["--size", "64", "--copies", "1", "--repeats", "1", "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "roofline.json").read_text())
    assert [p["columns"] for p in saved["points"]] == list(roofline.COLUMNS)
    assert set(saved["machine"]) == {"cpu", "cores"}
    assert "ridge" in capsys.readouterr().out


def test_both_ways_give_the_same_tokens_on_real_floats():
    prompt = list(b"any prompt")
    plain = kv_cache.generate_without_cache(prompt, 12, tiny_model())
    cached = kv_cache.generate_with_cache(prompt, 12, tiny_model())
    assert plain.token_ids == cached.token_ids


def test_measurement_keeps_each_steps_shortest_time():
    runs = [kv_cache.Run([1, 2], [0, 0], [3.0, 4.0]), kv_cache.Run([1, 2], [0, 0], [1.0, 6.0])]
    assert kv_cache._fastest(runs) == [1.0, 2.0]


def test_kv_cache_measurement_has_a_json_form_a_table_and_a_figure():
    got = json.loads(json.dumps(kv_cache.measure(list(b"ab"), 8, 2, tiny_model())))
    assert len(got["with_cache"]["flops"]) == len(got["without_cache"]["seconds"]) == 8
    assert got["without_cache"]["flops"][7] == 0  # parts count in checkpoints, not in objects
    got["without_cache"]["flops"] = got["with_cache"]["flops"] = list(range(1, 9))
    assert kv_cache.table(got).splitlines()[-1].split()[0] == "8"
    pytest.importorskip("matplotlib", reason="plots need the figures extra")
    ElementTree.fromstring(kv_cache.figure(got))


def test_flops_are_those_of_the_positions_computed():
    meter = kv_cache.Meter()
    parts = meter.parts()
    model = tiny_model(attention=parts.attention, linear=parts.linear)
    engine = kv_cache.LLMEngine(model=model, enable_prefix_caching=False)
    engine.generate([list(b"abc")], kv_cache.SamplingParams(max_tokens=1))
    weights = 16 * 32 + 16 * 16 + 16 * 48 + 24 * 16  # qkv, output, gate and up, down
    attention = 4 * 2 * 8 * (1 + 2 + 3)
    head = 2 * 257 * 16  # one row of logits, not three
    assert meter.flops == 2 * 3 * weights + attention + head
