"""lab.yaml: what is accepted, what is refused, and how a misconception is put in."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.learning import manifest
from course.learning.manifest import Hint, ManifestError, Misconception, wrong_solution

SOUND = """
id: "02-01"
title: A title
tag: CPU-OK
kind: build
minutes: 5
yours: [free, BlockPool.touch]
hints:
  test_a: ["one", "two"]
"""


def loaded(tmp_path: Path, text: str) -> manifest.Manifest:
    folder = tmp_path / "phase-02-x" / "labs" / "lab-01-y"
    folder.mkdir(parents=True)
    (folder / "lab.yaml").write_text(text, encoding="utf-8")
    return manifest.load(folder / "lab.yaml")


def test_a_sound_manifest_loads_with_its_hints_in_order(tmp_path):
    assert loaded(tmp_path, SOUND).hints == {"test_a": (Hint("one"), Hint("two"))}


FIELDS = SOUND.replace(
    '["one", "two"]', '["one", {field: waiting, text: "who waits"}, {field: step, text: "when"}]'
)


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        ("", ["one"]),
        ("seed 3, step 4, waiting\n  expected  ['a']", ["one", "who waits"]),
        ("seed 3 of x/step.gz, step 4, waiting\n  expected", ["one", "who waits"]),
        ("seed 3, step 4, running\n  waiting  ['b']", ["one"]),
        ("in that step the waiting one came first", ["one", "who waits", "when"]),
        ("awaiting", ["one"]),
    ],
)
def test_hints_for_a_field_are_those_of_the_field_that_failed(tmp_path, failure, shown):
    hints = loaded(tmp_path, FIELDS).hints["test_a"]
    assert [hint.text for hint in manifest.fitting(hints, failure)] == shown


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (SOUND + "colour: red\n", "unknown key 'colour'"),
        (SOUND.replace("minutes: 5", ""), "missing key 'minutes'"),
        (SOUND.replace("yours: [free, BlockPool.touch]\n", ""), "missing key 'yours'"),
        (SOUND.replace("free,", "free(),"), "yours ['free()', 'BlockPool.touch'] must be a list"),
        (SOUND + "hidden: []\n", "hidden [] must be a list of names in solution.py"),
        (SOUND.replace("5", "soon"), "minutes must be int, not 'soon'"),
        (SOUND.replace("5", "0"), "minutes 0 must be 1 or more"),
        (SOUND + "run_on: [tpu]\n", "run_on ['tpu'] must be a list of gpu and cpu"),
        (SOUND + "run_on: cpu\n", "run_on must be list, not 'cpu'"),
        (SOUND.replace("CPU-OK", "CPU"), "tag 'CPU' must be one of CPU-OK, GPU-OPT, GPU-REQ"),
        (SOUND.replace("kind: build\n", ""), "missing key 'kind'"),
        (SOUND.replace("build", "play"), "kind 'play' must be one of build, mend, find, measure,"),
        (SOUND.replace("02-01", "02-02"), "the folder, which says '02-01'"),
        (SOUND.replace('["one", "two"]', "one"), "hints.test_a must be a list"),
        (SOUND.replace('"two"', "{field: x}"), "mappings of field and text"),
        (SOUND.replace('"two"', "{field: 3, text: y}"), "mappings of field and text"),
        (SOUND.replace('"one", "two"', "{field: x, text: y}"), "one without a field"),
        (SOUND + "misconceptions:\n  - name: a\n", "misconception 'a': missing key 'why'"),
        (SOUND + "misconceptions:\n  - name: a\n    wy: b\n", "unknown key 'wy'"),
        (SOUND + "misconceptions:\n  - name: A b\n", "lower-case words joined by hyphens"),
        ("- a\n- b\n", "must be a mapping of keys, not list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_an_unsound_manifest_is_refused_by_file_and_key(tmp_path, text, complaint):
    with pytest.raises(ManifestError) as error:
        loaded(tmp_path, text)
    assert "lab.yaml: " in str(error.value) and complaint in str(error.value)


def test_every_problem_is_reported_at_once(tmp_path):
    with pytest.raises(ManifestError) as error:
        loaded(tmp_path, SOUND.replace("title: A title", "colour: red"))
    assert len(str(error.value).splitlines()) == 2


SOLUTION = """\
class Queue:
    def pop(self):
        if self.items:
            return self.items.pop(0)
        return None


class Stack:
    def pop(self):
        return self.items.pop(0)
"""


def mistake(old: str, new: str, inside: str | None = None) -> Misconception:
    return Misconception("m", "why", old, new, "test_a", inside)


def test_whole_lines_match_without_their_indentation_and_the_new_ones_get_it():
    wrong = wrong_solution(
        SOLUTION, mistake("if self.items:\n    return self.items.pop(0)\n", "if True:\n    pass\n")
    )
    assert "    def pop(self):\n        if True:\n            pass\n        return None\n" in wrong


def test_lines_with_their_own_indentation_are_put_in_literally():
    item = mistake("if self.items:", "self.n += 1\n        if self.items:", "Queue.pop")
    assert "        self.n += 1\n        if self.items:\n" in wrong_solution(SOLUTION, item)


def test_inside_limits_the_search_to_one_method():
    item = mistake("self.items.pop(0)", "self.items.pop()", "Stack.pop")
    assert wrong_solution(SOLUTION, item) == SOLUTION[:-3] + ")\n"


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        (mistake("self.items.pop(0)", "x"), "exactly once in solution.py; it occurs 2 times"),
        (mistake("no such text", "x"), "it occurs 0 times"),
        (mistake("return None", "return None"), "changes nothing"),
        (mistake("return None", "return ("), "is not Python"),
        (mistake("return None", "x", "Stack.push"), "which solution.py does not define"),
    ],
)
def test_a_misconception_that_cannot_be_put_in_is_refused(item, complaint):
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        wrong_solution(SOLUTION, item)
