"""Every exhibit fails on the release that has the bug and holds on the first that has not."""

from __future__ import annotations

import re

import pytest

from conformance.museum import EXHIBITS, INVARIANTS, Exhibit
from conformance.museum.exhibit import run
from conformance.real_core import core_of, why_not
from conformance.shrink import smaller
from course import museum, terminal
from course.learning.labs import CourseError

NEWEST = "0.33.0"


def shown(exhibit: Exhibit, version: str) -> bool:
    if problem := why_not(version):
        pytest.skip(problem)
    return exhibit.show(core_of(version)).broken


@pytest.mark.parametrize("number", [n for n, e in EXHIBITS.items() if e.bad == "0.22.1"])
def test_the_pin_has_it(number):
    assert shown(EXHIBITS[number], "0.22.1")


@pytest.mark.slow
@pytest.mark.parametrize("number", EXHIBITS)
def test_it_fails_before_and_holds_after(number):
    exhibit = EXHIBITS[number]
    assert shown(exhibit, exhibit.bad)
    if exhibit.good is None:
        assert shown(exhibit, NEWEST), "the newest release asked no longer has it: say which"
    else:
        assert not shown(exhibit, exhibit.good)


LAST_BAD = {49097: "0.27.1", 26765: "0.32.0", 47489: "0.28.0", 57951: "0.30.0", 54284: "0.28.0",
            52482: "0.27.1", 37307: "0.18.0", 33270: "0.14.0", 49377: "0.31.0", 42656: "0.27.1",
            25780: "0.11.0", 44560: "0.22.1",
            34616: "0.17.0", 28911: "0.11.2", 40707: "0.27.1", 45347: "0.23.0",
            49674: "0.29.0", 30916: "0.13.0"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", LAST_BAD)
def test_the_release_before_the_first_good_one_has_it(number):
    assert shown(EXHIBITS[number], LAST_BAD[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n, e in EXHIBITS.items() if e.broken is not None])
def test_nothing_can_be_taken_away_from_a_workload(number):
    """No request, block, token or step less shows the bug and its mend."""
    exhibit = EXHIBITS[number]
    for version in filter(None, (exhibit.bad, exhibit.good)):
        if problem := why_not(version):
            pytest.skip(problem)
    assert exhibit.workload is not None and exhibit.broken is not None

    def shows(workload, version):
        try:
            return run(
                core_of(version), workload, exhibit.broken, exhibit.stalls, exhibit.prepare
            ).broken
        except (ValueError, KeyError):  # a workload that a release refuses shows nothing
            return False

    for candidate in smaller(exhibit.workload):
        adds = [add for event in candidate["events"] for add in event["add"]]
        if any(add.get("min_tokens", 0) > add["max_tokens"] for add in adds):
            # A server refuses it: `vllm/sampling_params.py:510` `SamplingParams._verify_args`
            continue
        still = shows(candidate, exhibit.bad) and not (
            exhibit.good and shows(candidate, exhibit.good)
        )
        assert not still, candidate


def test_every_exhibit_says_what_a_visitor_asks():
    for exhibit in EXHIBITS.values():
        assert exhibit.invariant in INVARIANTS
        for text in (exhibit.title, exhibit.report, exhibit.cause, exhibit.mend):
            assert len(text) > 20, exhibit.number
        assert re.fullmatch(r"\d+\.\d+\.\d+", exhibit.bad)
        assert exhibit.url.endswith(str(exhibit.number))


def test_the_tour_has_every_exhibit_and_a_run_keeps_the_cause_covered(capsys):
    if problem := why_not("0.22.1"):
        pytest.skip(problem)
    museum.tour(terminal.make_console())
    said = capsys.readouterr().out
    assert all(str(number) in said for number in EXHIBITS)
    assert museum.run(terminal.make_console(), 39734, "0.22.1", reveal=False) == 1
    covered = capsys.readouterr().out
    assert "vLLM 0.22.1 has it:" in covered
    assert not any(word in covered for word in ("cause ", "first at step", "breaks "))
    museum.run(terminal.make_console(), 39734, "0.22.1", reveal=True)
    revealed = capsys.readouterr().out
    assert "has it, first at step 0" in revealed
    assert "cause   A prompt that is longer" in revealed
    with pytest.raises(CourseError, match=r"The museum has no exhibit 7\. There are: 49097"):
        museum.run(terminal.make_console(), 7, "", reveal=False)


def test_a_release_that_is_not_here_answers_from_the_recording_and_a_named_one_is_refused(
    capsys, monkeypatch
):
    def absent(version):
        raise CourseError(f"vLLM {version} is not here")

    monkeypatch.setattr(museum, "core", absent)
    assert museum.run(terminal.make_console(), 49674, "", reveal=False) == 0
    said = capsys.readouterr().out
    assert "vLLM 0.29.0 is not here" in said
    assert "vLLM 0.29.0 recorded; has it:" in said
    assert "vLLM 0.30.0 recorded; does not have it:" in said
    with pytest.raises(CourseError, match=r"vLLM 0\.29\.0 is not here"):
        museum.run(terminal.make_console(), 49674, "0.29.0", reveal=False)
