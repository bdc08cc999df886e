"""The recording of capture sizes, modes and dispatch: whole, by the rule, and still true."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import parts

CASES = parts.load("cudagraph_modes")


def of_kind(kind: str) -> list[dict[str, Any]]:
    """The cases of one kind."""
    return [case for case in CASES if case["kind"] == kind]


def test_default_ladders_follow_the_rule():
    for case in of_kind("ladder"):
        tokens = case["max_num_batched_tokens"]
        top = min(tokens, case["max_num_seqs"] * case["query_len"] * 2, 512)
        fine = case["performance_mode"] == "interactivity"
        sizes = {*range(1, min(top, 32) + 1)} if fine else {n for n in (1, 2, 4) if n <= top}
        sizes |= {*range(8, min(top + 1, 256), 8), *range(256, top + 1, 16)}
        if tokens <= top:
            sizes.add(tokens)
        assert case["sizes"] == sorted(sizes), case


def test_modes_resolve_to_what_the_backend_supports():
    for case in of_kind("resolve"):
        mode, support, split = case["mode"], case["support"], case["split"]
        piecewise = "PIECEWISE" if split else "NONE"
        resolved = mode
        if mode == "FULL" and support == "NEVER":
            resolved = "ValueError"
        elif mode == "FULL" and support != "ALWAYS":
            resolved = "FULL_AND_PIECEWISE" if split else "FULL_DECODE_ONLY"
        if resolved.startswith("FULL"):
            weak = support == "UNIFORM_SINGLE_TOKEN_DECODE" and case["query_len"] > 1
            if support == "NEVER" or weak:
                resolved = piecewise
        assert case["resolved"] == resolved, case


def test_dispatch_covers_what_labs_and_pages_ask_of_it():
    cases = of_kind("dispatch")
    assert {case["max_num_seqs"] for case in cases} == {16, 60, 256, 1024}
    assert len({case["mode"] for case in cases}) == 5 and len(cases) == 20
    assert all(len(case["found"]) == case["max_tokens"] == 600 for case in cases)
    (usual,) = [
        case
        for case in cases
        if case["mode"] == "FULL_AND_PIECEWISE" and case["max_num_seqs"] == 256
    ]
    passes = [(mode, len(sizes)) for mode, sizes in usual["passes"]]
    assert passes == [("PIECEWISE", 51), ("FULL", 35)]
    mixed, mixed_without_full, decode, decode_without_full = usual["found"][33 - 1]
    assert decode == ["FULL", 40]
    assert mixed == mixed_without_full == decode_without_full == ["PIECEWISE", 40]
    assert usual["found"][600 - 1] == [["NONE", 600], ["NONE", 600], None, None]


def test_a_decode_batch_whose_size_exceeds_max_num_seqs_has_no_full_graph():
    (case,) = [
        case
        for case in of_kind("dispatch")
        if case["mode"] == "FULL_AND_PIECEWISE" and case["max_num_seqs"] == 60
    ]
    assert case["found"][56 - 1][2] == ["FULL", 56]
    assert case["found"][57 - 1][2] == case["found"][60 - 1][2] == ["PIECEWISE", 64]


@pytest.mark.upstream
def test_the_real_code_still_says_so():
    from conformance.features.cudagraph import cudagraph_modes

    assert list(cudagraph_modes.cases()) == CASES
