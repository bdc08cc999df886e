"""Bit for bit: the packers and quantizers of labs 06-01 and 06-03 against vLLM's references.

What the pinned tree gave is in `recordings/parts/quantization_layouts.jsonl.gz`. Compared in both
directions: codes to words, and words to codes.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.features import ROOT
from course.files import load_module

PHASE = ROOT / "phase-06-quantization"
CASES = parts.load("quantization_layouts")
LAYOUTS = ("gptq", "awq", "compressed-tensors")


@functools.cache
def load(path: str) -> ModuleType:
    """A file of phase 06; phase folders are no packages."""
    return load_module(PHASE / path)


def int8_lab() -> ModuleType:
    return load("labs/lab-01-fake-quant-linear/solution.py")


def int4_lab() -> ModuleType:
    return load("labs/lab-03-int4-groups-and-packing/solution.py")


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["kind"] == kind]


def words(case: dict[str, Any], key: str) -> np.ndarray:
    return np.array(case[key], dtype=np.uint32).view(np.int32)


def test_the_recording_holds_every_kind_and_every_code() -> None:
    kinds = {case["kind"] for case in CASES}
    assert kinds == {"pack", "unpack", "int8_rows", "uint4b8", "uint4_zero_points"}
    assert {case["layout"] for case in of_kind("unpack")} == set(LAYOUTS)
    for kind in ("pack", "unpack", "uint4b8", "uint4_zero_points"):
        assert {code for case in of_kind(kind) for row in case["codes"] for code in row} == set(
            range(16)
        ), kind
    shapes = [np.shape(case["codes"]) for case in of_kind("pack")]
    assert any(inputs != outputs for inputs, outputs in shapes)
    assert any((words(case, "awq") < 0).any() for case in of_kind("pack")), "the sign bit is used"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_lab_packs_the_words_of_the_reference(layout: str) -> None:
    for case in of_kind("pack"):
        q = np.array(case["codes"]).T - 8
        packed = int4_lab().pack_layout(q, layout)
        assert packed.dtype == np.int32
        assert np.array_equal(packed, words(case, layout))
        assert np.array_equal(int4_lab().unpack_layout(words(case, layout), layout), q)


def test_the_lab_reads_arbitrary_words_as_the_reference_does() -> None:
    for case in of_kind("unpack"):
        stored = words(case, "words")
        q = int4_lab().unpack_layout(stored, case["layout"])
        assert np.array_equal(q, np.array(case["codes"]).T - 8)
        assert np.array_equal(int4_lab().pack_layout(q, case["layout"]), stored)


def test_an_awq_word_in_standard_order_is_noticed() -> None:
    lab = int4_lab()
    for case in of_kind("pack"):
        q = np.array(case["codes"]).T - 8
        assert not np.array_equal(lab.pack_words(np.ascontiguousarray(q.T)), words(case, "awq"))


def test_the_labs_int8_rows_are_the_online_recipes_codes_and_scales() -> None:
    for case in of_kind("int8_rows"):
        q, scales = int8_lab().quantize_per_channel(np.array(case["weight"], dtype=np.float32))
        assert q.tolist() == case["codes"]
        assert np.array_equal(scales, np.array(case["scales"], dtype=np.float32))


@pytest.mark.parametrize("kind", ["uint4b8", "uint4_zero_points"])
def test_the_evaluations_rules_with_16_codes_are_the_reference_quantizers(kind: str) -> None:
    rule = getattr(load("experiments/schemes.py"), kind)
    for case in of_kind(kind):
        weight = np.array(case["weight"], dtype=np.float32).T
        size = case["group_size"] if case["group_size"] > 0 else weight.shape[1]
        codes, scales, zeros = rule(weight, size)
        assert codes.T.tolist() == case["codes"]
        assert np.array_equal(scales.T, np.array(case["scales"], dtype=np.float32))
        if case["zero_points"] is not None:
            assert zeros.T.tolist() == case["zero_points"]
        else:
            assert np.all(zeros == 8), "the fixed bias"


@pytest.mark.upstream
def test_recording_again_gives_the_kept_cases() -> None:
    from conformance.features.quantization import quantization_layouts as recorder

    records = (recorder.pack, recorder.unpack, recorder.int8_rows, recorder.groups)
    assert [case for record in records for case in record()] == CASES
