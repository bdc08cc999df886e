"""The museum in a page: what is shown is recorded or run, and says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.museum import EXHIBITS, mini, recorded
from conformance.real_core import RealCore, why_not
from course.site import live_real, play, real_payload
from course.site.widgets import museum_rooms
from mini_vllm.parts import EngineParts

needs_the_tree = pytest.mark.skipif(bool(why_not()), reason=why_not())
PIN = f"vLLM {live_real.PIN}"


@pytest.mark.parametrize("number", mini.PARTS)
def test_a_mini_part_shows_what_the_release_with_the_bug_shows(number):
    shown = mini.PARTS[number].show()
    assert shown.broken and shown == recorded(number)[EXHIBITS[number].bad]


def test_a_part_without_the_bug_does_not_show_it():
    """The engine's own admission is 0.22.1's, which has 37307's mend."""
    exhibit = EXHIBITS[37307]
    shown = mini.decided(exhibit.workload, exhibit.broken, exhibit.stalls, EngineParts())
    assert not shown.broken and shown == recorded(37307)["0.22.1"]


def test_every_exhibit_has_what_it_was_given_and_answers_that_fail_before_and_hold_after():
    for shown in museum_rooms.document()["exhibits"]:
        by_release = {each["of"]: each for each in shown["answers"]}
        assert next(iter(by_release)) == PIN
        assert by_release[f"vLLM {shown['bad']}"]["broken"], shown["number"]
        if shown["good"]:
            assert not by_release[f"vLLM {shown['good']}"]["broken"], shown["number"]
        assert {each["how"] for each in shown["answers"]} == {"recorded"}
        if shown["step"] is not None:
            assert len(shown["given"]) > 1


def test_a_workload_is_said_with_all_that_it_turns():
    said = {number: " | ".join(museum_rooms.given(each)) for number, each in EXHIBITS.items()}
    for number, words in (
        (49097, "two plans in flight"), (49097, "C: a prompt of 1, max_tokens 2, comes in step 1"),
        (47489, "max_model_len 2"), (47489, "min_tokens 2"), (28911, "no chunks"),
        (43569, "chunks of at most 8"), (45138, "which fails once"), (46283, "no report comes"),
        (46283, "aborted in step 1"), (49674, "kept until its plan has run"),
    ):  # fmt: skip
        assert words in said[number], (number, said[number])
    assert said[52482] == ""


def test_without_a_release_here_its_answer_is_the_recorded_one(monkeypatch):
    monkeypatch.setattr(live_real, "releases", lambda: [])
    told = museum_rooms.ask(37307)
    assert [each["how"] for each in told] == ["mini", "recorded", "recorded", "recorded"]
    shown = next(e for e in museum_rooms.document()["exhibits"] if e["number"] == 37307)
    assert told[1:] == shown["answers"]
    with pytest.raises(ValueError, match="number=7: not exhibited; there are 49097, "):
        museum_rooms.ask(7)


@needs_the_tree
@pytest.mark.parametrize("number", [49097, 52482])
def test_with_a_release_here_it_is_run(number, monkeypatch):
    monkeypatch.setattr(live_real, "releases", lambda: [live_real.PIN])
    told = {each["of"]: each for each in museum_rooms.ask(number)}
    assert told[PIN]["how"] == "run"
    assert {**told[PIN], "how": "recorded"} in next(
        each["answers"] for each in museum_rooms.document()["exhibits"] if each["number"] == number
    )


@pytest.mark.slow
@needs_the_tree
def test_the_zip_of_the_pin_has_all_that_the_exhibits_ask_of_it(tmp_path: Path):
    name = real_payload.release_zip(live_real.PIN)
    path = tmp_path / "vllm.zip"
    path.write_bytes(play.zipped(real_payload.archives(live_real.ROOT)[name]))
    core = RealCore(path)
    for number, exhibit in EXHIBITS.items():
        assert exhibit.show(core) == recorded(number)[live_real.PIN], number
