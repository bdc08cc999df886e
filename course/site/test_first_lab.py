"""The lab on the home page: its answers are runs, its mend is the rule, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import suppress

import pytest

from course.conftest import REPOSITORY
from course.site.widgets import first_lab

RIGHT = first_lab.SHIPPED.replace(first_lab.NEVER, first_lab.MENDED)


@pytest.fixture(scope="module")
def document():
    return first_lab.document()


def test_every_answer_that_is_ready_is_the_run_of_its_text(document):
    texts = list(first_lab.texts())
    assert len(document["ready"]) == len(texts) == len(first_lab.EDITS), "two edits are one text"
    for text in texts:
        assert document["outcomes"][document["ready"][first_lab.key(text)]] == first_lab.run(text)


def test_ten_lines_are_wrong_in_one_and_right_with_its_mend():
    assert len(first_lab.SHIPPED.splitlines()) == 10
    broken, whole = first_lab.run(first_lab.SHIPPED), first_lab.run(RIGHT)
    assert (
        "the plan is empty while C, D have not finished" in broken["trouble"] and not broken["same"]
    )
    assert whole["same"] and not whole["trouble"]
    assert {tokens for _, kind, tokens in broken["rows"]["C"]} == {0}
    assert sum(tokens for _, kind, tokens in whole["rows"]["C"] if kind == "prefill") == 40


def test_a_mend_in_other_words_is_run_and_judged_by_its_plans():
    other = first_lab.SHIPPED.replace(first_lab.NEVER, "tokens = sorted((wanted, budget))[0]")
    assert first_lab.key(other) not in first_lab.document()["ready"]
    assert first_lab.run(other) == first_lab.run(RIGHT)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tokens = wanted", "step 3: the plan has 42 tokens: need at most the budget, 16"),
        ("tokens = budget", "step 0: A gets 16 tokens: need at most the 6 it lacks"),
        ("tokens = 0.5", "step 0: A gets 0.5 tokens: need a whole number above 0"),
        ("tokens = 1 / 0", "step 0: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "step 0: SystemExit: 3"),
        ("return [r]", "step 0: the plan is a list: need a dict"),
        ("return {'A': 1}", "step 0: the plan names 'A': need a running or waiting request"),
    ],
)
def test_a_plan_that_no_engine_could_compute_ends_the_run_by_its_name(line, said):
    assert first_lab.run(first_lab.SHIPPED.replace(first_lab.NEVER, line))["trouble"] == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def schedule(:", "line 1: "),
        ("1 / 0", "when Python ran the text: ZeroDivisionError"),
        ("exit(3)", "when Python ran the text: SystemExit"),
        ("x = 1\0", "line 1: source code string cannot contain null bytes"),
        ("x = 1", "need a function schedule"),
        ("#" * 4001, "has 4001 characters: at most 4000"),
    ],
)
def test_a_text_that_is_no_scheduler_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        first_lab.run(text)


BROKEN = [
    RIGHT.replace(*each)
    for each in (
        ("return plan", "returnplan"), ("def schedule", "defschedule"), ("for r in", "for rin"),
        ("-=", "- ="), ("    for r", "\tfor r"), ("budget -=", "budget\u00a0-="), ("==", "= ="),
    )
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_text_that_is_broken_is_none_of_those_that_are_ready(text, document):
    with suppress(ValueError):
        assert not first_lab.run(text)["same"]
    assert first_lab.key(text) not in document["ready"]


def test_the_page_makes_the_keys_of_texts_as_the_module_does():
    if not (node := shutil.which("node")):
        pytest.skip("needs node")
    source = (first_lab.Path(first_lab.__file__).parent / "first-lab.js").read_text("utf-8")
    body = source[source.index("const key =") : source.index("const text =")]
    spaced = RIGHT.replace("min(", "min (  ").replace("plan[r]", "plan [ r ]") + "\n\n  # done\n"
    texts = [*first_lab.texts(), *BROKEN, spaced, "\ta  =  1 # b"]
    script = f"{body}console.log(JSON.stringify({json.dumps(texts)}.map(key)))"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [first_lab.key(text) for text in texts]
    assert first_lab.key(texts[-2]) == first_lab.key(RIGHT)


def test_it_leads_to_the_first_lab():
    assert (REPOSITORY / first_lab.LAB / "starter.py").is_file()
