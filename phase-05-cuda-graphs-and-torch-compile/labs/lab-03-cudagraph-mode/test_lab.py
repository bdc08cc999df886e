"""What lab 05-03 pins: what a mode means, which graph a step gets, and what a backend makes of it.

Dispatch, capture passes and resolution are compared with recordings of the real v0.22.1 classes.
"""

from __future__ import annotations

from collections import Counter

import pytest

from conformance import parts
from labkit import refused

CASES = parts.load("cudagraph_modes")
DISPATCHES = [case for case in CASES if case["kind"] == "dispatch"]
TABLE = {
    "NONE": ("NONE", "NONE", False),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE", True),
    "FULL": ("FULL", "FULL", False),
    "FULL_DECODE_ONLY": ("FULL", "NONE", False),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE", True),
}


def same(got, expected, why: str) -> None:
    assert got == expected, f"{why}\nexpected {expected!r}\ncame     {got!r}"


def sizes_of(max_num_seqs: int) -> list[int]:
    """The default capture sizes of the real engine."""
    return next(case["sizes"] for case in DISPATCHES if case["max_num_seqs"] == max_num_seqs)


# --- part A: what a mode means --------------------------------------------------------------------


def test_composites_split(lab):
    for mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        same(
            (lab.decode_mode(mode), lab.mixed_mode(mode)),
            TABLE[mode][:2],
            f"{mode} as (uniform decode, everything else): decode comes first and is FULL.",
        )


def test_simple_modes_identity(lab):
    for mode in ("NONE", "PIECEWISE", "FULL"):
        same(
            (lab.decode_mode(mode), lab.mixed_mode(mode)),
            (mode, mode),
            f"{mode} is one routine for both kinds of batch.",
        )


def test_separate_routine(lab):
    got = {mode: lab.separate_routine(mode) for mode in TABLE}
    same(
        got,
        {mode: mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE") for mode in TABLE},
        "only the two composite modes treat decode separately.",
    )


def test_has_mode_both_slots(lab):
    for mode, (decode, mixed, _) in TABLE.items():
        for target in ("NONE", "PIECEWISE", "FULL"):
            same(
                lab.has_mode(mode, target),
                target in (decode, mixed),
                f"has_mode({mode!r}, {target!r}): {mode} means {decode} for decode and {mixed} for "
                "the rest.",
            )


def test_has_mode_rejects_composite(lab):
    same(lab.has_mode("FULL_AND_PIECEWISE", "FULL"), True, "FULL is one of its two modes.")
    for target in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        for mode in TABLE:
            refused(
                lambda mode=mode, target=target: lab.has_mode(mode, target),
                f"has_mode({mode!r}, {target!r}): no step runs as a composite, so the question is "
                "a mistake;",
            )


def test_requires_piecewise(lab):
    got = {mode: lab.requires_piecewise_compilation(mode) for mode in TABLE}
    same(
        got,
        {mode: row[2] for mode, row in TABLE.items()},
        "the model must be split before the first batch if any kind of batch runs PIECEWISE.",
    )


@pytest.mark.parametrize("mode", TABLE)
def test_routing_table(lab, mode):
    got = (lab.runtime_mode_for(mode, True), lab.runtime_mode_for(mode, False))
    same(got, TABLE[mode][:2], f"{mode}: (uniform decode batch, other batch).")


def test_unknown_mode(lab):
    for name in ("separate_routine", "decode_mode", "mixed_mode", "requires_piecewise_compilation"):
        for mode in ("FULL_ONLY", "full", ""):
            refused(lambda name=name, mode=mode: getattr(lab, name)(mode), f"{name}({mode!r})")
    refused(lambda: lab.has_mode("FULL", "EAGER"), "has_mode('FULL', 'EAGER')")
    refused(lambda: lab.has_mode("EAGER", "FULL"), "has_mode('EAGER', 'FULL')")
    refused(lambda: lab.runtime_mode_for("EAGER", False), "runtime_mode_for('EAGER', False)")


# --- part B: one step -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduled", "query_len", "expected"),
    [
        ([1, 1, 1], 1, True),
        ([1], 1, True),
        ([1, 1, 40], 1, False),
        ([3, 3], 3, True),
        ([3, 1], 3, False),
        ([4, 2], 3, False),
        ([3, 3, 0], 3, False),
        ([1, 1, 1], 3, False),
        ([3, 3], 1, False),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_uniform_decode(lab, scheduled, query_len, expected):
    got = lab.is_uniform_decode(max(scheduled), query_len, sum(scheduled), len(scheduled))
    same(
        bool(got),
        expected,
        f"tokens per request {scheduled}, a decode has {query_len}: uniform means that each "
        "request has exactly that many.",
    )


def test_dispatch_default_mode(lab):
    sizes = sizes_of(256)
    mode = "FULL_AND_PIECEWISE"
    got = [
        lab.dispatch(mode, 33, True, sizes, 256),
        lab.dispatch(mode, 33, False, sizes, 256),
        lab.dispatch(mode, 600, False, sizes, 256),
        lab.dispatch(mode, 40, True, sizes, 256),
    ]
    same(
        got,
        [("FULL", 40), ("PIECEWISE", 40), ("NONE", 600), ("FULL", 40)],
        "decode 33, mixed 33, mixed 600 (above the top of 512), decode 40 (a rung).",
    )


def test_dispatch_without_a_graph_is_unpadded(lab):
    sizes = sizes_of(256)
    got = [
        lab.dispatch("FULL_DECODE_ONLY", 33, False, sizes, 256),
        lab.dispatch("NONE", 33, True, sizes, 256),
        lab.dispatch("FULL_AND_PIECEWISE", 513, False, sizes, 256),
        lab.dispatch("FULL", 33, True, sizes, 256, forbid_full=True),
    ]
    same(
        got,
        [("NONE", 33), ("NONE", 33), ("NONE", 513), ("NONE", 33)],
        "padding exists to fit a graph; where there is none, every padded row is wasted work.",
    )


def test_dispatch_forbidden_full_falls_back(lab):
    sizes = sizes_of(256)
    got = [
        lab.dispatch(mode, 33, True, sizes, 256, forbid_full=True)
        for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE")
    ]
    same(
        got,
        [("PIECEWISE", 40), ("NONE", 33), ("PIECEWISE", 40)],
        "a decode step that must not use a full graph takes a piecewise one if there is one.",
    )


def test_dispatch_decode_rungs_end_at_max_num_seqs(lab):
    sizes = sizes_of(60)
    got = [lab.dispatch("FULL_AND_PIECEWISE", n, True, sizes, 60) for n in (48, 49, 56, 57, 60)]
    same(
        got,
        [("FULL", 48), ("FULL", 56), ("FULL", 56), ("PIECEWISE", 64), ("PIECEWISE", 64)],
        "max_num_seqs 60, decode batches of 48, 49, 56, 57, 60: no full decode graph of 64.",
    )
    same(
        lab.dispatch("FULL_DECODE_ONLY", 57, True, sizes, 60),
        ("NONE", 57),
        "without piecewise graphs the same batch has no graph at all.",
    )
    same(
        lab.dispatch("FULL", 57, True, sizes, 60),
        ("FULL", 64),
        "FULL is one routine: its graphs are for all batches and reach the top.",
    )


def test_dispatch_takes_sizes_in_any_order(lab):
    got = [lab.dispatch("PIECEWISE", n, False, [16, 2, 8, 1, 4], 16) for n in (1, 3, 9, 17)]
    expected = [("PIECEWISE", 1), ("PIECEWISE", 4), ("PIECEWISE", 16), ("NONE", 17)]
    same(got, expected, "1, 3, 9, 17 tokens with sizes 16, 2, 8, 1, 4: the smallest that holds it.")
    sizes = [16, 2, 8, 1, 4]
    lab.dispatch("FULL_AND_PIECEWISE", 3, True, sizes, 8)
    lab.capture_passes("FULL_AND_PIECEWISE", sizes, 8)
    same(sizes, [16, 2, 8, 1, 4], "the caller's list after dispatch and capture_passes: as it was.")


KINDS = ((False, False), (False, True), (True, False), (True, True))


@pytest.mark.parametrize("mode", TABLE)
def test_dispatch_of_the_real_engine(lab, mode):
    for case in DISPATCHES:
        if case["mode"] != mode:
            continue
        sizes, seqs = case["sizes"], case["max_num_seqs"]
        for num_tokens, row in enumerate(case["found"], start=1):
            for (uniform, forbid), found in zip(KINDS, row, strict=True):
                if found is None:
                    continue
                got = lab.dispatch(mode, num_tokens, uniform, sizes, seqs, forbid_full=forbid)
                assert tuple(got) == tuple(found), (
                    f"vLLM v0.22.1, {mode}, max_num_seqs {seqs}: {num_tokens} tokens, "
                    f"{'uniform decode' if uniform else 'mixed'}"
                    f"{', full graphs forbidden' if forbid else ''}\n"
                    f"expected {tuple(found)}\ncame     {tuple(got)}"
                )


# --- part C: startup ------------------------------------------------------------------------------


def bars(passes) -> list[tuple[str, str, int]]:
    return [(label, mode, len(sizes)) for label, mode, sizes in passes]


def test_capture_passes_of_each_mode(lab):
    sizes = sizes_of(256)
    expected = {
        "NONE": [],
        "PIECEWISE": [("mixed prefill-decode", "PIECEWISE", 51)],
        "FULL": [("mixed prefill-decode", "FULL", 51)],
        "FULL_DECODE_ONLY": [("decode", "FULL", 35)],
        "FULL_AND_PIECEWISE": [("mixed prefill-decode", "PIECEWISE", 51), ("decode", "FULL", 35)],
    }
    for mode, passes in expected.items():
        same(
            bars(lab.capture_passes(mode, sizes, 256)),
            passes,
            f"{mode}, max_num_seqs 256: (label, runtime mode, sizes) of each progress bar.",
        )


def test_capture_passes_are_equal_when_the_top_is_reachable(lab):
    got = bars(lab.capture_passes("FULL_AND_PIECEWISE", sizes_of(1024), 1024))
    expected = [("mixed prefill-decode", "PIECEWISE", 51), ("decode", "FULL", 51)]
    same(got, expected, "with max_num_seqs 1024 a decode batch can fill every rung up to 512.")


def test_capture_passes_leave_out_what_is_empty(lab):
    got = lab.capture_passes("FULL_AND_PIECEWISE", [16, 8], 4)
    expected = [("mixed prefill-decode", "PIECEWISE", [16, 8])]
    same(
        [tuple(entry) for entry in got],
        expected,
        "sizes 8 and 16 with max_num_seqs 4: no decode graph can be filled, so there is no bar.",
    )


def test_capture_passes_of_the_real_engine(lab):
    for case in DISPATCHES:
        got = lab.capture_passes(case["mode"], case["sizes"][::-1], case["max_num_seqs"])
        same(
            [[mode, list(sizes)] for _, mode, sizes in got],
            case["passes"],
            f"vLLM v0.22.1, {case['mode']}, max_num_seqs {case['max_num_seqs']}: [runtime mode, "
            "sizes], PIECEWISE first, largest size first.",
        )


# --- part D: what the backend allows --------------------------------------------------------------


def test_resolve_full(lab):
    got = [
        lab.resolve("FULL", support, split)
        for support in ("ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE")
        for split in (True, False)
    ]
    expected = ["FULL", "FULL", *["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"] * 2]
    same(
        got,
        expected,
        "FULL under ALWAYS, UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE, each split and not: full "
        "graphs stay for decode, and the rest runs piecewise if it can.",
    )
    for split in (True, False):
        refused(
            lambda split=split: lab.resolve("FULL", "NEVER", split),
            "FULL with a backend that supports no full graph at all",
        )


def test_resolve_never_gives_up_full_graphs(lab):
    got = [
        lab.resolve(mode, "NEVER", split)
        for mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
        for split in (True, False)
    ]
    same(
        got,
        ["PIECEWISE", "NONE", "PIECEWISE", "NONE"],
        "NEVER, each composite split and not: only pieces without attention can be graphs.",
    )


def test_resolve_drafts_need_uniform_batch(lab):
    got = [
        lab.resolve("FULL_AND_PIECEWISE", support, True, 3)
        for support in ("UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
    ]
    same(
        got,
        ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"],
        "a decode of 3 tokens is no single-token decode.",
    )
    same(
        lab.resolve("FULL", "UNIFORM_SINGLE_TOKEN_DECODE", True, 3),
        "PIECEWISE",
        "two downgrades after each other: FULL to FULL_AND_PIECEWISE, and that to PIECEWISE.",
    )


def test_resolve_refuses_unknown_support(lab):
    same(lab.resolve("PIECEWISE", "NEVER", True), "PIECEWISE", "PIECEWISE needs no support.")
    refused(lambda: lab.resolve("NONE", "SOMETIMES", True), "support 'SOMETIMES'")
    refused(lambda: lab.resolve("EAGER", "ALWAYS", True), "mode 'EAGER'")


def test_resolve_table(lab):
    different = Counter()
    first = ""
    for case in CASES:
        if case["kind"] != "resolve":
            continue
        arguments = (case["mode"], case["support"], case["split"], case["query_len"])
        try:
            got = lab.resolve(*arguments)
        except ValueError:
            got = "ValueError"
        if got != case["resolved"]:
            different[case["mode"]] += 1
            first = first or f"resolve{arguments}: expected {case['resolved']}, came {got}"
    assert not different, (
        f"vLLM v0.22.1 resolves {sum(different.values())} of 80 combinations of mode, support, "
        f"split and query length to something else, by mode {dict(different)}; the first:\n{first}"
    )
