"""Backends of later releases, chosen by their own code for devices that are not here."""

from __future__ import annotations

import functools

import pytest

from conformance.features.attention.since import DEVICES, chosen
from conformance.parts import selector_outcome
from conformance.real_core import why_not

pytestmark = pytest.mark.slow
CHANGED = [
    ("T4", "heads of 128", "0.23.0", "0.24.0", "FLASHINFER", "TRITON_ATTN"),
    ("T4", "KV fp8", "0.23.0", "0.24.0", "FLASHINFER", "TRITON_ATTN"),
    ("H100", "MLA sparse", "0.24.0", "0.25.0", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"),
]


def first(version: str, device: str, row: str) -> str:
    pytest.importorskip("torch")
    if problem := why_not(version):
        pytest.skip(problem)
    return _rows(version, device)[row][0]


_rows = functools.cache(lambda version, device: chosen(version, DEVICES[device]))


@pytest.mark.parametrize(("device", "row", "last", "since", "before", "now"), CHANGED)
def test_rows_that_a_later_release_chooses_another_way(device, row, last, since, before, now):
    assert first(last, device, row) == before
    assert first(since, device, row) == first("0.33.0", device, row) == now


def test_the_pins_rows_are_those_that_were_recorded():
    pytest.importorskip("torch")
    if problem := why_not():
        pytest.skip(problem)
    rows = chosen("0.22.1", DEVICES["H100"])
    assert rows["heads of 128"] == selector_outcome("9.0")["valid"]
