"""The documents of the book's widgets: whole, JSON, and equal to what the real engine computes."""

from __future__ import annotations

import json

import pytest

from conformance import parts
from course import widgets
from course.conftest import REPOSITORY


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
