"""What a page cannot do of the labs, test by test, and why: the one place that says so."""

from __future__ import annotations

PROCESS = "starts another process, which a page cannot: run this lab on your machine too"

SOCKET = "listens on a socket, which a page cannot: run this lab on your machine too"

PAGES = "reads every phase's questions, which no page holds: run this lab on your machine too"

TESTS: dict[str, dict[str, str]] = {
    "05-04": {"test_run_on_a_pretended_engine": PROCESS},
    "06-02": {
        "test_run_measures_every_format_beside_its_prediction": PROCESS,
        "test_run_predicts_without_a_gpu": PROCESS,
    },
    "07-02": {"test_the_run_script_predicts_without_a_gpu": PROCESS},
    "10-02": {"test_two_processes_and_one_result": PROCESS},
    "19-06": {"test_the_bank_is_the_courses": PAGES},
    "15-02": {
        "test_run_predicts_without_a_gpu": PROCESS,
        "test_two_servers_on_loopback": SOCKET,
    },
}
"""By lab, the tests that are skipped in a page. Those that need a GPU, torch or the pinned tree
skip themselves there, as they do on a machine without."""

LABS: dict[str, str] = {}
"""Labs that cannot be done in a page at all: none so far."""

_ALONE = "starts other processes, which a page cannot: run it on your machine"
_AFTER = "goes on from a block that starts other processes: run it on your machine"
_P10 = "phase-10-distributed-inference/"
_P15 = "phase-15-disaggregated-serving/"
_P16 = "phase-16-serving-apis-and-parsers/"

BLOCKS: dict[str, dict[str, str]] = {
    f"{_P10}00-guide.md": {
        **dict.fromkeys(("0", "6", "7", "8", "9"), _ALONE),
        **dict.fromkeys(("3", "5"), _AFTER),
    },
    f"{_P10}02-mini-build.md": {"4": _ALONE},
    f"{_P15}02-mini-build.md": {"3": _ALONE},
    f"{_P16}00-guide.md": {"0": _ALONE, "8": _ALONE},
    f"{_P16}02-mini-build.md": {"0": _ALONE, "1": _ALONE, "2": _ALONE},
}
"""By page, the Python blocks (by their place among the page's, from 0) that cannot run in it."""

PINNED_TREE = "course upstream fetch"
"""Stands in the reason of a test that skips itself without the pinned tree, as in every page."""
