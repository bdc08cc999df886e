"""The documents of the book's widgets: whole, JSON, and equal to what the real engine computes."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from conformance import parts
from course.conftest import REPOSITORY
from course.files import load_module
from course.site import widgets


@pytest.mark.parametrize("name", sorted(widgets.WIDGETS))
def test_a_document_is_json_and_the_same_every_time(name):
    make = widgets.WIDGETS[name]
    assert json.dumps(make()) == json.dumps(make())


@pytest.mark.parametrize("name", sorted(widgets.WIDGETS))
def test_every_widget_has_its_script(name):
    script = REPOSITORY / "book" / "widgets" / f"{name}.js"
    assert f'CourseWidgets.mount("{name}"' in script.read_text(encoding="utf-8")


def test_the_calculator_counts_blocks_as_the_real_engine_does():
    cases = parts.load("kv_capacity")
    assert cases
    for case in cases:
        per_token = 2 * case["num_layers"] * case["num_kv_heads"] * case["head_size"]
        found = widgets.capacity(
            case["available_memory"],
            per_token * case["dtype_bytes"],
            case["block_size"],
            case["max_model_len"],
        )
        # The recording divides twice and rounds down twice: by a layer's block, then by layers.
        assert found["num_blocks"] == case["num_blocks"]
        assert found["max_concurrency"] == case["max_concurrency"]


def test_parameters_are_those_of_the_published_models():
    counts = {name: widgets.num_parameters(config) for name, config in widgets.models().items()}
    assert counts["Llama 3 8B"] == 8_030_261_248
    assert counts["byte-llama, shipped here"] == 3_213_824


def test_decode_is_bound_by_memory_at_batch_1_and_the_cache_outweighs_the_weights_in_the_end():
    shape = widgets.roofline()["models"]["Llama 3 8B"]
    gpu = widgets.GPUS["A100 80 GB"]
    alone = widgets.decode_step(shape, gpu, 1, 128)
    many = widgets.decode_step(shape, gpu, 64, 2048)
    assert alone["intensity"] < alone["ridge"]
    assert many["kv_bytes"] > many["weight_bytes"] == alone["weight_bytes"]


@pytest.fixture(scope="module")
def study():
    """The phase's own decoding and rounding of the formats."""
    path = REPOSITORY / "phase-06-quantization" / "studies" / "code_points.py"
    before = list(sys.path)
    module = load_module(path)
    sys.path[:] = before
    return module


@pytest.mark.parametrize("name", ["int8", "int4", "E4M3", "E5M2", "E2M1"])
def test_code_points_are_those_of_the_study(study, name):
    assert widgets.FORMATS[name]["points"] == study.grid(name).tolist()


@pytest.mark.parametrize("name", ["int8", "E4M3", "E5M2", "int4", "E2M1", "MXFP4", "NVFP4"])
@pytest.mark.parametrize("spike", [1, 12])
def test_a_quantized_row_is_that_of_the_study(study, name, spike):
    # The study works in float32 for NVFP4, so its sums differ in the last digits.
    for row in (np.array(values) for values in widgets.code_points()["rows"].values()):
        loud = np.abs(row).argmax()
        spiked = row.copy()
        spiked[loud] *= spike
        by_block = {"MXFP4": study.mxfp4, "NVFP4": study.nvfp4}
        quantize = by_block.get(name, lambda W: study.per_tensor(W, name))
        got = quantize(spiked[None])[0]
        rest = np.delete(spiked, loud)
        error = np.linalg.norm(np.delete(got, loud) - rest) / np.linalg.norm(rest)
        found = widgets.on_grid(row, name, 256, spike)
        assert found["error"] == pytest.approx(error, rel=1e-5)
        assert found["zeros"] == (np.delete(got, loud) == 0).sum()


def test_smaller_groups_keep_a_spike_among_fewer(study):
    row = np.array(next(iter(widgets.code_points()["rows"].values())))
    errors = [widgets.on_grid(row, "int4", size, 20)["error"] for size in (256, 128, 32, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 2 * errors[-1]


def test_a_step_reads_about_as_many_experts_as_the_formula_says():
    for example in widgets.expert_bytes()["examples"]:
        experts, top_k, batch = (example[name] for name in ("experts", "top_k", "batch"))
        drawn = widgets.drawn_experts(experts, top_k, batch)
        assert all(len(set(token)) == top_k for token in drawn), "no expert twice for a token"
        assert abs(example["drawn"] - example["touched"]) <= max(1.5, 0.1 * experts)
