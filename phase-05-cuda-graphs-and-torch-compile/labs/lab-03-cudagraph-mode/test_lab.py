"""What lab 05-03 pins: what a mode means, which graph a step gets, and what a backend makes of it.

Dispatch, capture passes and resolution are compared with recordings of the real v0.22.1 classes.
"""

from __future__ import annotations

from collections import Counter

from conformance import parts
from labkit import refused

CASES = parts.load("cudagraph_modes")
DISPATCHES = [case for case in CASES if case["kind"] == "dispatch"]


def same(got, expected, why: str) -> None:
    assert got == expected, f"{why}\nexpected {expected!r}\ncame     {got!r}"


def resolve(lab, mode: str, *arguments) -> str:
    """What an engine runs with that was asked for `mode`."""
    return lab.CudagraphDispatcher(mode, [8, 4, 2, 1], 8).resolve(*arguments)


def sizes_of(max_num_seqs: int) -> list[int]:
    """The default capture sizes of the real engine."""
    return next(case["sizes"] for case in DISPATCHES if case["max_num_seqs"] == max_num_seqs)


# --- one step ------------------------------------------------------------------------------------


def test_uniform_decode(lab):
    for scheduled, query_len, expected in (
        ([1, 1, 1], 1, True), ([1], 1, True), ([1, 1, 40], 1, False), ([3, 3], 3, True),
        ([3, 1], 3, False), ([4, 2], 3, False), ([3, 3, 0], 3, False), ([1, 1, 1], 3, False),
        ([3, 3], 1, False),
    ):  # fmt: skip
        got = lab.CudagraphDispatcher.is_uniform_decode(
            max(scheduled), query_len, sum(scheduled), len(scheduled)
        )
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
        lab.CudagraphDispatcher(mode, sizes, 256).dispatch(33, True),
        lab.CudagraphDispatcher(mode, sizes, 256).dispatch(33, False),
        lab.CudagraphDispatcher(mode, sizes, 256).dispatch(600, False),
        lab.CudagraphDispatcher(mode, sizes, 256).dispatch(40, True),
    ]
    same(
        got,
        [("FULL", 40), ("PIECEWISE", 40), ("NONE", 600), ("FULL", 40)],
        "decode 33, mixed 33, mixed 600 (above the top of 512), decode 40 (a rung).",
    )


def test_dispatch_without_a_graph_is_unpadded(lab):
    sizes = sizes_of(256)
    got = [
        lab.CudagraphDispatcher("FULL_DECODE_ONLY", sizes, 256).dispatch(33, False),
        lab.CudagraphDispatcher("NONE", sizes, 256).dispatch(33, True),
        lab.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, 256).dispatch(512, False),
        lab.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, 256).dispatch(513, False),
        lab.CudagraphDispatcher("FULL", sizes, 256).dispatch(33, True, forbid_full=True),
    ]
    same(
        got,
        [("NONE", 33), ("NONE", 33), ("PIECEWISE", 512), ("NONE", 513), ("NONE", 33)],
        "padding exists to fit a graph; where there is none, every padded row is wasted work.",
    )


def test_dispatch_forbidden_full_falls_back(lab):
    sizes = sizes_of(256)
    got = [
        lab.CudagraphDispatcher(mode, sizes, 256).dispatch(33, True, forbid_full=True)
        for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE")
    ]
    same(
        got,
        [("PIECEWISE", 40), ("NONE", 33), ("PIECEWISE", 40)],
        "a decode step that must not use a full graph takes a piecewise one if there is one.",
    )


def test_dispatch_decode_rungs_end_at_max_num_seqs(lab):
    sizes = sizes_of(60)
    got = [
        lab.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, 60).dispatch(n, True)
        for n in (48, 49, 56, 57, 60)
    ]
    same(
        got,
        [("FULL", 48), ("FULL", 56), ("FULL", 56), ("PIECEWISE", 64), ("PIECEWISE", 64)],
        "max_num_seqs 60, decode batches of 48, 49, 56, 57, 60: no full decode graph of 64.",
    )
    same(
        lab.CudagraphDispatcher("FULL_DECODE_ONLY", sizes, 60).dispatch(57, True),
        ("NONE", 57),
        "without piecewise graphs the same batch has no graph at all.",
    )
    same(
        lab.CudagraphDispatcher("FULL", sizes, 60).dispatch(57, True),
        ("FULL", 64),
        "FULL is one routine: its graphs are for all batches and reach the top.",
    )


def test_dispatch_takes_sizes_in_any_order(lab):
    got = [
        lab.CudagraphDispatcher("PIECEWISE", [16, 2, 8, 1, 4], 16).dispatch(n, False)
        for n in (1, 3, 9, 17)
    ]
    expected = [("PIECEWISE", 1), ("PIECEWISE", 4), ("PIECEWISE", 16), ("NONE", 17)]
    same(got, expected, "1, 3, 9, 17 tokens with sizes 16, 2, 8, 1, 4: the smallest that holds it.")
    sizes = [16, 2, 8, 1, 4]
    lab.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, 8).dispatch(3, True)
    lab.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes, 8).capture_passes()
    same(sizes, [16, 2, 8, 1, 4], "the caller's list after dispatch and capture_passes: as it was.")


KINDS = ((False, False), (False, True), (True, False), (True, True))


def test_dispatch_of_the_real_engine(lab):
    agree, wrong, first = 0, Counter(), ""
    for case in DISPATCHES:
        made = lab.CudagraphDispatcher(case["mode"], case["sizes"], case["max_num_seqs"])
        for num_tokens, row in enumerate(case["found"], start=1):
            for (uniform, forbid), found in zip(KINDS, row, strict=True):
                if found is None:
                    continue
                got = tuple(made.dispatch(num_tokens, uniform, forbid_full=forbid))
                if got == tuple(found):
                    agree += 1
                    continue
                kind = "uniform decode" if uniform else "mixed"
                kind += ", full graphs forbidden" if forbid else ""
                wrong[f"{case['mode']} {kind}"] += 1
                first = first or (
                    f"{case['mode']}, max_num_seqs {case['max_num_seqs']}: {num_tokens} tokens, "
                    f"{kind}\nexpected {tuple(found)}\ncame     {got}"
                )
    assert not wrong, (
        f"{agree:,} of {agree + sum(wrong.values()):,} recorded steps of vLLM v0.22.1 agree. The "
        "others: " + "; ".join(f"{where}: {count:,}" for where, count in wrong.most_common())
        + f". The first:\n{first}"
    )  # fmt: skip


# --- startup -------------------------------------------------------------------------------------


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
            bars(lab.CudagraphDispatcher(mode, sizes, 256).capture_passes()),
            passes,
            f"{mode}, max_num_seqs 256: (label, runtime mode, sizes) of each progress bar.",
        )


def test_capture_passes_are_equal_when_the_top_is_reachable(lab):
    got = bars(lab.CudagraphDispatcher("FULL_AND_PIECEWISE", sizes_of(1024), 1024).capture_passes())
    expected = [("mixed prefill-decode", "PIECEWISE", 51), ("decode", "FULL", 51)]
    same(got, expected, "with max_num_seqs 1024 a decode batch can fill every rung up to 512.")


def test_capture_passes_leave_out_what_is_empty(lab):
    got = lab.CudagraphDispatcher("FULL_AND_PIECEWISE", [16, 8], 4).capture_passes()
    expected = [("mixed prefill-decode", "PIECEWISE", [16, 8])]
    same(
        [tuple(entry) for entry in got],
        expected,
        "sizes 8 and 16 with max_num_seqs 4: no decode graph can be filled, so there is no bar.",
    )


def test_capture_passes_of_the_real_engine(lab):
    for case in DISPATCHES:
        got = lab.CudagraphDispatcher(
            case["mode"], case["sizes"][::-1], case["max_num_seqs"]
        ).capture_passes()
        same(
            [[mode, list(sizes)] for _, mode, sizes in got],
            case["passes"],
            f"vLLM v0.22.1, {case['mode']}, max_num_seqs {case['max_num_seqs']}: [runtime mode, "
            "sizes], PIECEWISE first, largest size first.",
        )


# --- what the backend allows ---------------------------------------------------------------------


def test_resolve_full(lab):
    got = [
        resolve(lab, "FULL", support, split)
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
            lambda split=split: resolve(lab, "FULL", "NEVER", split),
            "FULL with a backend that supports no full graph at all",
        )


def test_resolve_never_gives_up_full_graphs(lab):
    got = [
        resolve(lab, mode, "NEVER", split)
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
        resolve(lab, "FULL_AND_PIECEWISE", support, True, 3)
        for support in ("UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
    ]
    same(
        got,
        ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"],
        "a decode of 3 tokens is no single-token decode.",
    )
    same(
        resolve(lab, "FULL", "UNIFORM_SINGLE_TOKEN_DECODE", True, 3),
        "PIECEWISE",
        "two downgrades after each other: FULL to FULL_AND_PIECEWISE, and that to PIECEWISE.",
    )


def test_resolve_refuses_unknown_support(lab):
    same(resolve(lab, "PIECEWISE", "NEVER", True), "PIECEWISE", "PIECEWISE needs no support.")
    refused(lambda: resolve(lab, "NONE", "SOMETIMES", True), "support 'SOMETIMES'")
    refused(lambda: resolve(lab, "EAGER", "ALWAYS", True), "mode 'EAGER'")


def test_resolve_table(lab):
    different = Counter()
    first = ""
    for case in CASES:
        if case["kind"] != "resolve":
            continue
        arguments = (case["mode"], case["support"], case["split"], case["query_len"])
        try:
            got = resolve(lab, *arguments)
        except ValueError:
            got = "ValueError"
        if got != case["resolved"]:
            different[case["mode"]] += 1
            first = first or f"resolve{arguments}: expected {case['resolved']}, came {got}"
    assert not different, (
        f"vLLM v0.22.1 resolves {sum(different.values())} of 80 combinations of mode, support, "
        f"split and query length to something else, by mode {dict(different)}; the first:\n{first}"
    )
