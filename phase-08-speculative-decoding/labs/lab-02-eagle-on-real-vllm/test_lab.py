"""What lab 08-02 pins: what can stand behind a printed line, and which number of it cannot."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import pytest

from labkit import refused, same
from labkit.modules import sibling

CASES = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))["cases"]
WORKED = (
    "SpecDecoding metrics: Mean acceptance length: 2.33, Accepted throughput: 2.00 tokens/s, "
    "Drafted throughput: 4.00 tokens/s, Accepted: 4 tokens, Drafted: 8 tokens, Per-position "
    "acceptance rate: 0.667, 0.333, 0.333, Avg Draft acceptance rate: 50.0%"
)
"""The line of the runs (3, 3), (3, 0), (0, 0), (2, 1), k = 3, in two seconds."""
MOST = 7
"""Drafts that are looked at where every possibility is tried."""


def runs_of(case) -> list[tuple[int, int]]:
    return [(drafted, accepted) for drafted, accepted, count in case["runs"] for _ in range(count)]


def counters_of(case) -> tuple[int, int, int]:
    """Drafts, draft tokens and accepted tokens of a recorded case."""
    runs = runs_of(case)
    return sum(d > 0 for d, _ in runs), sum(d for d, _ in runs), sum(a for _, a in runs)


# --- every possibility, tried one by one ----------------------------------------------------------


@functools.cache
def printed(k: int) -> list[tuple[int, int, int, dict[str, str]]]:
    """Drafts, accepted and draft tokens of all counters, with what the engine prints of them."""
    found = []
    for drafts in range(1, MOST + 1):
        for counts in itertools.product(range(drafts, -1, -1), repeat=k):
            if list(counts) != sorted(counts, reverse=True):
                continue  # who accepts the third draft has accepted the second
            accepted = sum(counts)
            for tokens in range(max(drafts, accepted), k * drafts + 1):
                words = {
                    "mean_acceptance_length": f"{1 + accepted / drafts:.2f}",
                    "accepted": str(accepted),
                    "drafted": str(tokens),
                    "per_position": ", ".join(f"{count / drafts:.3f}" for count in counts),
                    "acceptance_rate": f"{accepted / tokens * 100:.1f}",
                }
                found.append((drafts, accepted, tokens, words))
    return found


def words_of(line: str) -> dict[str, str]:
    """The numbers of a line as they are printed."""
    parts = line.partition("length: ")[2]
    length, parts = parts.split(", Accepted throughput: ")
    one, parts = parts.split(" tokens/s, Drafted throughput: ")
    other, parts = parts.split(" tokens/s, Accepted: ")
    accepted, parts = parts.split(" tokens, Drafted: ")
    drafted, parts = parts.split(" tokens, Per-position acceptance rate: ")
    rates, parts = parts.split(", Avg Draft acceptance rate: ")
    return {
        "mean_acceptance_length": length, "accepted_throughput": one, "drafted_throughput": other,
        "accepted": accepted, "drafted": drafted, "per_position": rates,
        "acceptance_rate": parts.removesuffix("%"),
    }  # fmt: skip


def by_trying(line: str, k: int, without: str = "") -> list[int]:
    """The drafts of all counters that print the line, whatever the seconds."""
    said = words_of(line)
    half = 0.005 + 1e-9
    one, other = float(said["accepted_throughput"]), float(said["drafted_throughput"])
    found = set()
    for drafts, accepted, tokens, words in printed(k):
        timed = without in ("accepted_throughput", "drafted_throughput") or (
            accepted * (other - half) <= tokens * (one + half)
            and tokens * (one - half) <= accepted * (other + half)
        )
        if timed and all(said[name] == words[name] for name in words if name != without):
            found.add(drafts)
    return sorted(found)


# --- the wrong accountings ------------------------------------------------------------------------


def with_number(line: str, name: str, value: str) -> str:
    """A line with another number."""
    before, after = {
        "mean_acceptance_length": ("length: ", ", Accepted t"),
        "accepted_throughput": ("Accepted throughput: ", " tokens/s, D"),
        "accepted": ("Accepted: ", " tokens, D"),
        "drafted": ("Drafted: ", " tokens, P"),
        "per_position": ("Per-position acceptance rate: ", ", Avg"),
        "acceptance_rate": ("Avg Draft acceptance rate: ", "%"),
    }[name]
    head, _, rest = line.partition(before)
    return head + before + value + after + rest.partition(after)[2]


def lies(case) -> list[tuple[str, str, str]]:
    """Of a case: an accounting, the number it gets wrong, and the line with that number."""
    (drafts, _, accepted), runs, line = counters_of(case), len(runs_of(case)), case["line"]
    rates = [float(rate) for rate in words_of(line)["per_position"].split(", ")]
    reached = [1.0, *rates]
    conditional = [b / a if a else 0.0 for a, b in zip(reached, rates, strict=False)]
    told = [
        ("the run's own token is left out", "mean_acceptance_length", f"{accepted / drafts:.2f}"),
        ("all runs are drafts", "mean_acceptance_length", f"{1 + accepted / runs:.2f}"),
        ("accepted over drafts", "acceptance_rate", f"{accepted / drafts * 100:.1f}"),
        ("every draft is full", "drafted", str(case["k"] * drafts)),
        ("the own tokens are accepted", "accepted", str(accepted + drafts)),
        ("rates of those that got so far", "per_position",
         ", ".join(f"{rate:.3f}" for rate in conditional)),
        ("the last position first", "per_position",
         ", ".join(f"{rate:.3f}" for rate in reversed(rates))),
        ("a minute taken for a second", "accepted_throughput",
         f"{accepted / case['seconds'] / 60:.2f}"),
    ]  # fmt: skip
    found = [(how, name, with_number(line, name, value)) for how, name, value in told]
    return [(how, name, lie) for how, name, lie in found if lie != line]


def small() -> list[dict]:
    """Recorded cases that are small enough to try everything."""
    return [case for case in CASES if case["k"] <= 3 and counters_of(case)[0] <= MOST]


# --- how many drafts ------------------------------------------------------------------------------


def test_worked_example(lab, record_property):
    same(lab.possible_drafts(WORKED, 3), [3], f"drafts behind {WORKED}")
    record_property("measured.drafts", lab.possible_drafts(WORKED, 3)[0])
    lie = with_number(WORKED, "mean_acceptance_length", "1.33")
    same(
        lab.suspects(lie, 3),
        ["mean_acceptance_length"],
        "1.33 for 2.33: 4 accepted tokens with 1.33 are 12 drafts, and there are 8 draft tokens. "
        "Without the 1.33 the rest is true; without any other number it is not",
    )
    same(lab.idle_runs(WORKED, 3, 8), [1], "8 output tokens, 4 of them accepted drafts: four runs")


def test_every_recorded_line_tells_its_drafts(lab):
    """A quotient taken for exact, though it was rounded before it was printed."""
    alone = 0
    for case in CASES:
        drafts, _, _ = counters_of(case)
        got = lab.possible_drafts(case["line"], case["k"], 450)
        assert drafts in got, (
            f"vLLM's own classes logged this of {drafts} drafts, k {case['k']}: {case['line']}\n"
            f"expected {drafts} among them\ncame     {got}"
        )
        alone += got == [drafts]
    assert alone >= 110, (
        "the line of nearly every recorded case leaves one number of drafts\n"
        f"expected it in at least 110 of {len(CASES)}\ncame     {alone}"
    )


@pytest.mark.slow
def test_no_possibility_is_missed_and_none_is_invented(lab):
    """Runs that carry nothing, or only full ones; a third draft accepted without the second."""
    cases = small()
    assert len(cases) >= 6, f"small recorded cases: need 6, there are {len(cases)}"
    for case in cases:
        k = case["k"]
        for how, _, line in [("nothing", "", case["line"]), *lies(case)]:
            for without in ("", *lab.NAMES):
                expected = by_trying(line, k, without)
                got = lab.possible_drafts(line, k, MOST, without)
                assert got == expected, (
                    f"k {k}, at most {MOST} drafts, wrong is: {how}; not believed: "
                    f"{without or 'nothing'}\n{line}\nexpected {expected}\ncame     {got}"
                )


# --- which number ---------------------------------------------------------------------------------


def test_of_four_logs_the_one_that_lies(lab):
    """A suspicion of a line that is true; a number that is believed because it is an integer."""
    chosen = [case for case in CASES if 8 <= counters_of(case)[0] <= 60 and counters_of(case)[2]]
    for place in range(0, 24, 4):
        four = chosen[place : place + 4]
        for at, case in enumerate(four):
            how, name, lie = lies(case)[(place + at) % len(lies(case))]
            lines = [lie if other is case else other["line"] for other in four]
            found = [
                lab.suspects(line, each["k"], 150) for line, each in zip(lines, four, strict=True)
            ]
            others = [each for number, each in enumerate(found) if number != at]
            same(others, [[], [], []], "the three logs that vLLM's own classes printed")
            assert name in found[at], (
                f"k {case['k']}, wrong is: {how}\n{lie}\nexpected {name} among the suspects\n"
                f"came     {found[at]}"
            )


@pytest.mark.slow
def test_suspects_are_those_that_explain_the_line_alone(lab):
    """Too many suspects, or the first of several."""
    for case in small():
        for how, _, line in lies(case):
            expected = (
                []
                if by_trying(line, case["k"])
                else [name for name in lab.NAMES if by_trying(line, case["k"], name)]
            )
            got = lab.suspects(line, case["k"], MOST)
            assert got == expected, (
                f"k {case['k']}, at most {MOST} drafts, wrong is: {how}\n{line}\n"
                f"expected {expected}\ncame     {got}"
            )


# --- what no log says -----------------------------------------------------------------------------


def test_runs_without_drafts_are_counted_from_the_usage(lab, record_property):
    """Accepted tokens taken for runs."""
    for case in CASES[:60]:
        runs, (drafts, _, accepted) = runs_of(case), counters_of(case)
        got = lab.idle_runs(case["line"], case["k"], len(runs) + accepted, 450)
        assert len(runs) - drafts in got, (
            f"{len(runs)} runs gave {len(runs) + accepted} tokens; {case['line']}\n"
            f"expected {len(runs) - drafts} among them\ncame     {got}"
        )
    counters = lab.count_runs([(4, 4)] + [(0, 0)] * 9, 4)
    record_property("measured.length", 1 + counters["num_accepted_tokens"] / counters["num_drafts"])


def test_what_is_no_line_is_refused(lab):
    """Half of a line's numbers, or another server's k."""
    for line, k, without in (
        (WORKED[: WORKED.index(", Accepted:")], 3, ""), (WORKED, 4, ""), (WORKED, 3, "drafts"),
    ):  # fmt: skip
        refused(
            lambda a=(line, k, 9, without): lab.possible_drafts(*a),
            f"possible_drafts({line!r}, {k}, without={without!r})",
        )


@pytest.mark.upstream
def test_the_pinned_tree_logs_these_lines(lab):
    record = sibling(__file__, "record")
    same(
        record.drawn(),
        [{key: case[key] for key in ("k", "seconds", "runs")} for case in CASES],
        "the cases",
    )
    for case in CASES:
        line = record.line_of(case)
        same(line, case["line"], f"SpecDecodingLogging itself, of {case['runs']}")
        assert lab.possible_drafts(line, case["k"], 450), (
            f"expected a number of drafts behind {line}"
        )
