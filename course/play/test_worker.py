"""The worker's Python, without a browser: blocks, functions, and what a grading leaves behind.

That labs are graded as here is checked by `course book runtime --check`, in Node.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from course.play import worker


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Call the worker's Python; the answer, and the events in `told.events`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "_pages", {})
    events = []

    def call(kind, **payload):
        events.clear()
        answer = worker.call(
            kind, json.dumps(payload), lambda line: events.append(json.loads(line))
        )
        return json.loads(answer)

    call.events = events
    return call


def block(told, code, index=0, page="guide"):
    return told("block", page=page, index=index, code=code)["result"]


def test_getting_ready_imports_what_stays_from_one_grading_to_the_next(told, monkeypatch):
    monkeypatch.delitem(sys.modules, "course.learning.runner", raising=False)
    assert told("ready") == {"result": None}
    assert {"pytest", "numpy", "course.learning.runner"} <= sys.modules.keys()
    assert told("ready", engine=True) == {"result": None}
    assert {"mini_vllm", "numpy.random"} <= sys.modules.keys()
    assert told.events == []


def test_a_block_is_answered_with_what_it_printed(told):
    assert block(told, "print('a', 1)\nprint('b')") == {"text": "a 1\nb\n", "error": None}


def test_what_a_block_prints_is_told_line_by_line(told):
    block(told, "print('a', 1)\nprint('b', end='')")
    assert told.events == [{"event": "out", "text": "a 1\n"}, {"event": "out", "text": "b"}]


def test_the_blocks_of_a_page_share_their_names(told):
    block(told, "x = 20")
    assert block(told, "print(x + 1)", 1)["text"] == "21\n"


def test_another_page_shares_nothing(told):
    block(told, "x = 20")
    assert "NameError" in block(told, "print(x)", page="other")["error"]


def test_a_class_of_one_block_may_be_a_dataclass_of_the_next(told):
    block(told, "import dataclasses\nclass A: pass")
    code = "@dataclasses.dataclass\nclass B(A):\n    x: 'int'\nprint(B(1))"
    assert block(told, code, 1) == {"text": "B(x=1)\n", "error": None}


def test_a_traceback_begins_in_the_block_and_shows_its_line(told):
    error = block(told, "def half(n):\n    return 1 / n\nhalf(0)", 4)["error"]
    assert error.splitlines()[1].strip() == 'File "block 4", line 3, in <module>'
    assert "return 1 / n" in error and error.endswith("ZeroDivisionError: division by zero")
    assert "worker.py" not in error


def test_a_block_that_is_not_python_is_told_so(told):
    assert "SyntaxError" in block(told, "x = = 1")["error"]


def test_a_block_that_leaves_python_is_an_error_like_others(told):
    assert "SystemExit" in block(told, "raise SystemExit(3)")["error"]


def test_a_block_that_prints_without_end_is_stopped(told):
    result = block(told, "while True:\n    print('x' * 1000)")
    assert "characters were printed" in result["error"]
    assert len(result["text"]) <= worker.LONGEST_OUTPUT


def test_a_function_of_the_course_is_called_with_its_arguments(told):
    arguments = {"label": "x", "text": "y"}
    answer = told("python", module="json", function="dumps", arguments=arguments)
    assert "need a public function of the course" in answer["error"]
    answer = told(
        "python",
        module="mini_vllm.models.config",
        function="nobody",
        arguments={},
    )
    assert "nobody" in answer["error"]
    answer = told(
        "python", module="labkit.versions", function="version", arguments={"package": "-"}
    )
    assert answer == {"result": ""}


def test_a_module_keeps_its_state_between_calls(told, monkeypatch):
    counter = ModuleType("course.counter_of_this_test")
    exec("n = 0\ndef count():\n    global n\n    n += 1\n    return n", counter.__dict__)
    monkeypatch.setitem(sys.modules, counter.__name__, counter)
    counts = [told("python", module=counter.__name__, function="count") for _ in range(2)]
    assert counts == [{"result": 1}, {"result": 2}]


def test_a_private_function_is_refused(told):
    answer = told("python", module="labkit.versions", function="__import__")
    assert "need a public function" in answer["error"]


def test_an_unknown_kind_is_named(told):
    error = told("dance")["error"]
    assert error == "ValueError: kind='dance': need one of ready, grade, block, python"


@pytest.mark.slow
def test_modules_of_the_course_are_new_inside_and_the_old_ones_are_back_after(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(worker, "_root", tmp_path)
    (tmp_path / "of_the_course.py").write_text("state = []\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import of_the_course as old

    old.state.append("mine")
    with worker._apart():
        import of_the_course as new

        assert new is not old and new.state == []
        new.state.append("theirs")
        sys.modules["_lab_left"] = ModuleType("_lab_left")
    assert sys.modules.pop("of_the_course") is old and old.state == ["mine"]
    assert "_lab_left" not in sys.modules


@pytest.mark.slow
def test_what_a_grading_does_to_the_environment_is_undone(monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "_root", tmp_path)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with worker._apart():
        monkeypatch.setenv("LAB_IMPL", "starter")
        sys.path.insert(0, "/nowhere")
    assert sys.path == path
    import os

    assert os.environ.get("LAB_IMPL") != "starter"


def test_a_lab_that_was_not_kept_is_refused(told):
    assert told("grade", lab="99-99")["error"].startswith("KeyError")


def test_a_file_that_is_not_the_learners_is_refused(told, monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "_folders", {"00-01": tmp_path})
    monkeypatch.setattr(worker, "_originals", {"00-01": {"starter.py": "", "solution.py": ""}})
    answer = told("grade", lab="00-01", files={"test_lab.py": ""})
    assert "files names 'test_lab.py'" in answer["error"]
    assert not (tmp_path / "test_lab.py").exists()
