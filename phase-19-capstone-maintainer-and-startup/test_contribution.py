"""The contribution: its tests fail on a release and pass with the patch, and catch other fixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.real_core import why_not
from course.files import load_module

RUN: Any = load_module(Path(__file__).parent / "contribution" / "run.py")
BOTH = "test_withdrawn_victim_is_not_hit_beyond_what_was_computed"
SYNC, ASYNC = f"{BOTH}(async_scheduling=False)", f"{BOTH}(async_scheduling=True)"
NEWCOMER = "test_newcomer_does_not_hit_a_withdrawn_block()"
CONTROL = "test_victim_that_was_not_planned_keeps_its_blocks()"


def failing(core: Any) -> set[str]:
    return {name for name, said in RUN.outcomes(core).items() if said != "passed"}


@pytest.fixture(params=RUN.RELEASES)
def version(request):
    if problem := why_not(request.param):
        pytest.skip(problem)
    return request.param


@pytest.mark.slow
def test_they_fail_on_the_release_and_pass_with_the_patch(version):
    assert failing(RUN.core(version, False)) == {SYNC, ASYNC, NEWCOMER}
    assert failing(RUN.core(version, True)) == set()
    assert len(RUN.outcomes(RUN.core(version, True))) == 4


@pytest.mark.slow
def test_they_tell_the_patch_from_fixes_that_forget_too_much(version):
    """With two plans in flight a fix that waits for outputs loses what is being computed."""
    assert failing(RUN.other_fix(version, "until output")) == {ASYNC}
    assert failing(RUN.other_fix(version, "everything")) == {SYNC, ASYNC, NEWCOMER}


@pytest.mark.slow
def test_no_drawn_workload_reads_a_stale_block_with_the_patch(version):
    ended, read = RUN.stale(RUN.core(version, False), 100)
    assert ended > 30 and read
    assert RUN.stale(RUN.core(version, True), 100) == (ended, 0)


@pytest.mark.slow
def test_a_patch_of_another_release_is_refused():
    if problem := why_not("0.33.0"):
        pytest.skip(problem)
    text = (RUN.HERE / "0.22.1.patch").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"vLLM 0\.33\.0: the patch does not apply"):
        RUN.patched_core("0.33.0", text.replace("encoder_compute_budget", "budget"))
