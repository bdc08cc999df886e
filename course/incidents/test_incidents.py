"""Bad days: what was recorded decides the cause, and a knob keeps the limit."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from course.incidents import judge, ledger
from course.learning import exchange

CAUSE_AND_FIX = {
    "monday": ("head-needs-blocks", "policy=priority", "max_num_seqs=16"),
    "tuesday": ("prefill-beside-decode", "max_num_batched_tokens=64", "max_num_seqs=1"),
    "wednesday": ("preemption", "max_num_seqs=4", "max_num_seqs=2"),
    "thursday": ("adapter-slots", "max_loras=2", "max_num_seqs=16"),
    "friday": ("max-num-seqs", "max_num_seqs=4", "max_num_batched_tokens=2048"),
    "saturday": ("budget", "max_num_batched_tokens=128", "max_num_seqs=16"),
    "sunday": ("short-prefix", "block_size=16", "max_num_seqs=16"),
}
"""By day the cause, a knob that helps, and one that a hasty reader turns."""
days = pytest.mark.parametrize("name", judge.NAMES)


@days
def test_nothing_contradicts_one_cause_and_a_line_that_is_there_contradicts_each_other(name):
    day, folder = judge.load(name), judge.folder_of(name)
    left = []
    for cause in judge.CAUSES:
        found = judge.contradiction(day, cause)
        if found is None:
            left.append(cause)
            continue
        data = (folder / found.file).read_bytes()
        text = gzip.decompress(data) if found.file.endswith(".gz") else data
        line = text.decode().splitlines()[found.line - 1]
        assert found.quoted in (line, json.dumps(json.loads(line), separators=(",", ":"))
                                if line.startswith("{") else "")  # fmt: skip
        if step := re.search(r"step (\d+)", found.says):
            assert json.loads(line)["step"] == int(step[1])
    assert left == [CAUSE_AND_FIX[name][0]]


@days
def test_the_simulator_plans_as_the_server_did_and_one_knob_keeps_the_limit(name):
    day = judge.load(name)
    plans = [step["num_scheduled_tokens"] for step in day.case["steps"]]
    assert judge.judging.measure(day.case).plans == plans
    assert judge.replay(day).missed
    _, fix, hasty = CAUSE_AND_FIX[name]
    assert not judge.replay(day, *fix.split("=")).missed
    assert judge.replay(day, *hasty.split("=")).missed


@days
def test_log_metrics_and_trace_are_of_one_server(name):
    day = judge.load(name)
    plans = [sum(step["num_scheduled_tokens"].values()) for step in day.case["steps"]]
    said = [re.search(r"(\d+) context tokens.* (\d+) generation tokens", line) for line in day.log]
    logged = [int(found[1]) + int(found[2]) for found in said if found]
    assert [count for count in logged if count] == plans
    assert judge.stat_lines(day) and len(day.moments) > 2
    last = day.moments[-1][1]
    asked = judge.judging.adds(day.case).values()
    for metric, count in (
        ("generation_tokens_total", sum(each["max_tokens"] for each in asked)),
        ("prompt_tokens_total", sum(len(each["prompt_token_ids"]) for each in asked)),
        ("num_preemptions_total", sum(len(step["preempted"]) for step in day.case["steps"])),
        ("prefix_cache_hits_total", sum(sum(s["new"].values()) for s in day.case["steps"])),
    ):
        assert judge.value_of(last, metric) == count, metric


def test_a_knob_or_a_value_that_is_none_is_refused_by_name():
    day = judge.load("monday")
    for knob, value, told in (
        ("num_blocks", "80", "knob=.*: need one of"), ("max_num_seqs", "0", "from 1 to"),
        ("max_num_seqs", "many", "whole number"), ("policy", "lifo", "fcfs or priority"),
        ("enable_prefix_caching", "1", "true or false"), ("max_loras", "2", "has an adapter"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            judge.replay(day, knob, value)
    with pytest.raises(ValueError, match=r"cause=.*: need one of"):
        judge.contradiction(day, "bad-luck")


@pytest.mark.slow
def test_a_reader_names_the_cause_turns_a_knob_and_takes_it_along(course, little_course, tmp_path):
    assert "not looked at" in course("incident").out
    ran = course("incident", "friday")
    assert "Avg prompt throughput" in ran.out and "num_requests_waiting" in ran.out
    ran = course("incident", "friday", "--set", "max_num_seqs=8")
    assert (ran.code, "Name the cause first" in ran.err) == (2, True)
    ran = course("incident", "friday", "--cause", "budget")
    assert (ran.code, "contradicts it" in ran.out) == (1, True)
    assert course("incident", "friday", "--cause", "max-num-seqs").code == 0
    ran = course("incident", "friday", "--set", "max_num_batched_tokens=4096")
    missed = judge.replay(judge.load("friday"), "max_num_batched_tokens", "4096").missed
    assert (ran.code, f"Not yet: {missed}" in " ".join(ran.out.split())) == (1, bool(missed))
    assert course("incident", "friday", "--set", "max_num_seqs=8").code == 0
    done = ledger.read(little_course)
    entry = done["friday"]
    assert (entry.wrong, entry.cause, entry.replays, entry.fix) == (
        ["budget"], "max-num-seqs", 2, "max_num_seqs=8",
    )  # fmt: skip
    file = tmp_path / "work.json"
    assert course("export", str(file)).code == 0
    (little_course / ".course" / ledger.FILE).unlink()
    assert "1 incident taken" in course("import", str(file)).out
    assert ledger.read(little_course) == done
    assert "Nothing in it is new" in course("import", str(file)).out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"wrong": ["luck"]}, "wrong must be"), ({"cause": 5}, "cause must be"),
        ({"replays": True}, "replays must be"), ({"fix": "x" * 101}, "fix must be"),
        ({"at": "soon"}, "at must be"),
    ],
)  # fmt: skip
def test_an_entry_that_does_not_fit_is_refused(change, told):
    entry = {"wrong": [], "cause": "", "replays": 0, "fix": "", "at": "2026-01-01T00:00:00Z"}
    data = {"format": exchange.FORMAT, "version": exchange.VERSION}
    data |= {part: {} for part in exchange.PARTS}
    assert not list(exchange.problems_of({**data, "incidents": {"monday": entry}}))
    (problem,) = exchange.problems_of({**data, "incidents": {"monday": entry | change}})
    assert told in problem


def test_a_ledger_that_cannot_be_read_is_moved_aside(course, little_course):
    file = little_course / ".course" / ledger.FILE
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"days": {"monday": 5}}', encoding="utf-8")
    ran = course("incident")
    assert (ran.code, "moved to incidents.unreadable" in " ".join(ran.err.split())) == (2, True)
    assert course("incident").code == 0
