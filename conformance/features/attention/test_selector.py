"""The recording of the attention selector: whole, known choices, and what the real one says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from conformance import parts
from conformance.features.attention import attention_selector

cases = parts._selector_cases  # read when first asked, by whichever process runs this file


def case(capability: str, **setting: bool) -> dict[str, Any]:
    """The case of a device with the standard wheel, but for what `setting` says."""
    wanted = {"fa4": True, "trtllm": True, "batch_invariant": False, **setting}
    found = [c for c in cases() if c["capability"] == capability]
    (only,) = [c for c in found if all(c[key] == value for key, value in wanted.items())]
    return only


def choice(recorded: dict[str, Any], **asked: Any) -> str:
    """The backend recorded for a configuration, "" for an error."""
    wanted = {"head_size": 128, "dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None}
    wanted |= asked
    number = list(attention_selector.configurations()).index(wanted)
    valid = recorded["outcomes"][recorded["found"][number]]["valid"]
    return valid[0] if valid else ""


@pytest.mark.slow
def test_the_recording_covers_every_device_and_every_configuration():
    settings = list(attention_selector.settings())
    assert [{key: c[key] for key in settings[0]} for c in cases()] == settings
    size = len(list(attention_selector.configurations()))
    for recorded in cases():
        assert recorded["grid"] == attention_selector.GRID
        assert recorded["features"] == attention_selector.FEATURES
        assert len(recorded["found"]) == size
        assert set(recorded["found"]) == set(range(len(recorded["outcomes"])))


@pytest.mark.slow
def test_the_lookup_finds_what_the_recording_holds_at_every_place():
    features = attention_selector.FEATURES
    for recorded in cases():
        setting = {key: recorded[key] for key in ("fa4", "trtllm", "batch_invariant")}
        for number, asked in enumerate(attention_selector.configurations()):
            if number % 89:
                continue
            feature = {key: asked[key] for key in asked if key not in recorded["grid"]}
            assert feature in features
            grid = {key: asked[key] for key in recorded["grid"]}
            found = parts.selector_outcome(recorded["capability"], feature, **grid, **setting)
            assert found == recorded["outcomes"][recorded["found"][number]]


def test_the_lookup_names_what_is_not_recorded():
    for capability, feature, asked, words in (
        ("6.0", None, {}, "capabilities are 7.5"),
        ("9.0", None, {"head_size": 127}, "head_size=127 is not recorded"),
        ("9.0", {"use_mlo": True}, {}, "use_mlo"),
        ("9.0", None, {"sliding": 1}, "'sliding' is not recorded"),
    ):
        with pytest.raises(ValueError, match=words):
            parts.selector_outcome(capability, feature, **asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "asked", "chosen"),
    [
        ("8.0", {}, "FLASH_ATTN"),
        ("9.0", {}, "FLASH_ATTN"),
        ("10.0", {}, "FLASHINFER"),
        ("7.5", {}, "FLASHINFER"),
        ("7.5", {"head_size": 80}, "TRITON_ATTN"),
        ("9.0", {"head_size": 100}, "TRITON_ATTN"),
        ("8.9", {"dtype": "float32", "head_size": 16}, "FLEX_ATTENTION"),
        ("8.9", {"kv_cache_dtype": "fp8"}, "FLASHINFER"),
        ("9.0", {"kv_cache_dtype": "fp8"}, "FLASH_ATTN"),
        ("8.0", {"has_sink": True, "head_size": 64}, "TRITON_ATTN"),
        ("9.0", {"has_sink": True, "head_size": 64}, "FLASH_ATTN"),
        ("10.0", {"has_sink": True, "head_size": 64}, "FLASHINFER"),
        ("8.0", {"use_mla": True, "head_size": 576}, "TRITON_MLA"),
        ("9.0", {"use_mla": True, "head_size": 576}, "FLASH_ATTN_MLA"),
        ("10.0", {"use_mla": True, "head_size": 576}, "FLASHINFER_MLA"),
        ("9.0", {"use_mla": True, "head_size": 576, "kv_cache_dtype": "fp8"}, "FLASHMLA"),
        ("9.0", {"block_size": 8}, ""),
    ],
)
def test_choices_that_the_source_lets_one_read(capability, asked, chosen):
    assert choice(case(capability), **asked) == chosen


def test_what_the_wheel_holds_changes_a_choice():
    assert choice(case("9.0"), head_size=512) == "FLASH_ATTN"
    assert choice(case("9.0", fa4=False), head_size=512) == "FLASHINFER"
    sinks = {"has_sink": True, "head_size": 64}
    assert choice(case("10.0", trtllm=False), **sinks) != choice(case("10.0"), **sinks)


def test_every_reason_and_every_backend_of_the_priority_lists_occurs():
    reasons, backends = set(), set()
    for recorded in cases():
        for outcome in recorded["outcomes"]:
            backends |= {*outcome["valid"], *outcome["rejected"]}
            reasons |= set(itertools.chain(*outcome["rejected"].values()))
    assert len(backends) == 13
    assert "ImportError" not in reasons
    assert {"head_size not supported", "batch invariance not supported"} <= reasons


@pytest.mark.upstream
def test_the_real_selector_still_says_so():
    (recorded,) = [c for c in cases() if c == case("9.0")]
    setting = {key: recorded[key] for key in next(attention_selector.settings())}
    assert attention_selector.record([setting]) == [recorded]
