"""The CI steps that lab 19-01 reads are those of the pinned tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.real_core.places import tree_of
from course.files import load_module

HERE = Path(__file__).parent
CI: Any = load_module(HERE / "ci_areas.py")
LAB: Any = load_module(HERE / "labs" / "lab-01-find-and-scope-a-pr" / "solution.py")
SCHEDULER, PARSER = "vllm/v1/core/sched/scheduler.py", "vllm/tool_parsers/utils.py"


def areas_of(version: str) -> Any:
    folder = tree_of(version) / ".buildkite"
    if not folder.is_dir():
        pytest.skip(f"vLLM {version} is not here")
    return CI.areas(folder)


def test_the_file_is_what_the_pinned_tree_says():
    assert CI.text(areas_of("0.22.1")) == CI.FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "counts"),
    [("0.22.1", (176, 128, 21, 39, 23, 0)), ("0.33.0", (245, 163, 31, 56, 36, 1))],
)
def test_the_guide_says_of_each_release_what_its_files_do(version, counts):
    areas = areas_of(version)
    due = [step for step in areas["steps"] if not step["optional"]]
    whole = sum("vllm/" in step.get("source_file_dependencies", ()) for step in due)
    selected = [len(LAB.jobs_for([path], areas)) for path in (SCHEDULER, PARSER, "docs/README.md")]
    assert (len(areas["steps"]), len(due), whole, *selected) == counts


def test_steps_carry_no_commands():
    steps = json.loads(CI.FILE.read_text(encoding="utf-8"))["steps"]
    allowed = {"label", "file", "source_file_dependencies", "device", "optional"}
    assert {key for step in steps for key in step} <= allowed
