"""First bad and first good release: made-up verdicts, and a bug of vLLM's own."""

from __future__ import annotations

import itertools

import pytest

from conformance import bisect, workload_file
from conformance.bisect import stretch
from conformance.decisions import Parting
from conformance.real_core import why_not

STARVED = """
config: {num_blocks: 6, policy: priority, async_scheduling: true, long_prefill_token_threshold: 6}
requests:
- {id: A, prompt: 11, max_tokens: 1, priority: 9}
- {id: B, prompt: 4, max_tokens: 6, step: 1}
- {id: C, prompt: 3, max_tokens: 6, step: 1, priority: 1}
"""
"""Issue 49097 of vLLM: a request that preempts itself takes C's turn with it."""


def needs(*versions):
    reasons = [problem for version in versions if (problem := why_not(version))]
    return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons))


def verdict(marks):
    """Versions a, b, ... of which those marked x are bad; what was asked is noted."""
    versions = [chr(ord("a") + place) for place in range(len(marks))]
    asked = []

    def is_bad(version):
        asked.append(version)
        return marks[versions.index(version)] == "x"

    return versions, is_bad, asked


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 17])
def test_a_single_stretch_is_found_with_few_questions_and_no_question_twice(count):
    for first, last in itertools.combinations_with_replacement(range(count), 2):
        marks = "." * first + "x" * (last - first + 1) + "." * (count - last - 1)
        for at in range(first, last + 1):
            versions, is_bad, asked = verdict(marks)
            found = stretch(versions, versions[at], is_bad)
            assert (found.first_bad, found.last_bad) == (versions[first], versions[last])
            assert found.last_good == (versions[first - 1] if first else None)
            assert found.first_good == (versions[last + 1] if last + 1 < count else None)
            assert len(set(asked)) == len(asked)
            beside = at.bit_length() + (count - 1 - at).bit_length()
            assert len(asked) <= beside + 4


def test_both_sides_of_each_change_and_one_further_are_asked():
    versions, is_bad, _ = verdict("......xxxxxx......")
    found = stretch(versions, "i", is_bad)
    assert found.asked.items() >= {"e": False, "f": False, "g": True, "h": True}.items()
    assert found.asked.items() >= {"k": True, "l": True, "m": False, "n": False}.items()


@pytest.mark.parametrize(
    ("marks", "at", "first", "last", "elsewhere"),
    [
        ("....x.xxxxx.......", "i", "g", "k", "e"),  # bad again, two before
        ("......xxxxx.x.....", "i", "g", "k", "m"),  # and two behind
        ("......x.xxx.......", "i", "i", "k", "g"),  # a good one inside
    ],
)
def test_a_verdict_that_comes_and_goes_beside_a_change_has_all_asked(
    marks, at, first, last, elsewhere
):
    versions, is_bad, asked = verdict(marks)
    found = stretch(versions, at, is_bad)
    assert sorted(found.asked) == versions and len(asked) == len(versions) - 1
    assert (found.first_bad, found.last_bad) == (first, last)
    assert "".join(found.elsewhere) == elsewhere


def test_what_comes_and_goes_between_those_asked_is_seen_when_all_are_asked():
    versions, is_bad, _ = verdict("x.....xxxxxx......")
    assert stretch(versions, "i", is_bad).elsewhere == ()
    found = stretch(versions, "i", is_bad, every=True)
    assert (found.first_bad, found.last_bad, found.elsewhere) == ("g", "l", ("a",))


def test_a_release_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="bad='z': need one of a, b"):
        stretch(["a", "b"], "z", bool)


def test_an_unknown_field_is_refused_before_anything_is_decided():
    with pytest.raises(ValueError, match="field='bogus'"):
        bisect.bisect(workload_file.read("0"), ["a"], ["bogus"], "a")


def test_a_release_that_cannot_decide_the_workload_is_left_out(monkeypatch):
    says = {"a": None, "b": None, "c": 1, "d": 1, "e": 2}

    def decide(workload, version):
        if says[version] is None:
            raise ValueError(f"{version} is too old")
        return [{"running": says[version]}]

    monkeypatch.setattr(bisect, "core_of", lambda version: version)
    monkeypatch.setattr(bisect, "decide", decide)
    history = bisect.bisect({}, list(says), ["running"], "d")
    assert history.left_out.keys() == {"a", "b"}
    found = history.stretch
    assert (found.last_good, found.first_bad, found.first_good) == (None, "c", "e")
    assert (history.came, history.went) == (None, Parting(0, "running", 1, 2))


@pytest.mark.slow
@needs("0.18.0", "0.22.1", "0.27.1", "0.28.0", "0.33.0")
def test_a_bug_of_vllm_is_bad_from_the_oldest_to_0_27_1_and_good_in_0_28_0():
    versions = ["0.18.0", "0.22.1", "0.27.1", "0.28.0", "0.33.0"]
    history = bisect.bisect(
        workload_file.parse(STARVED), versions, ["num_scheduled_tokens"], "0.22.1"
    )
    found = history.stretch
    assert (found.last_good, found.first_bad) == (None, "0.18.0")
    assert (found.last_bad, found.first_good) == ("0.27.1", "0.28.0")
    assert history.went == Parting(2, "num_scheduled_tokens", {"B": 1}, {"B": 1, "C": 1})
