"""README's commands for people who run vLLM say what README shows, on the sample that it names."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from course.conftest import REPOSITORY

SAMPLE = "conformance/flight_sample"
MODULES = {"course": "course.cli", "mini-vllm": "mini_vllm.entrypoints.cli"}


def shown() -> list[tuple[list[str], list[str]]]:
    """The commands of the section that run here, and the lines shown for each."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    block = text.partition("## If you run vLLM")[2].partition("```console\n")[2].partition("```")[0]
    found: list[tuple[list[str], list[str]]] = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((shlex.split(line[2:], comments=True), []))
        elif line.strip() != "...":
            found[-1][1].append(line)
    return [(command, lines) for command, lines in found if command[:2] == ["uv", "run"]]


@pytest.mark.slow
def test_every_line_of_the_second_door_is_printed(tmp_path):
    commands = shown()
    assert [command[2:4] for command, _ in commands] == [
        ["course", "replay"], ["course", "why"], ["mini-vllm", "fit"], ["mini-vllm", "simulate"]
    ]  # fmt: skip
    for command, lines in commands:
        words = [
            {"flight-recordings": SAMPLE, "cost.json": str(tmp_path / "cost.json")}.get(word, word)
            for word in command[3:]
        ]
        done = subprocess.run(
            [sys.executable, "-m", MODULES[command[2]], *words],
            cwd=REPOSITORY, capture_output=True, text=True, check=True,
        )  # fmt: skip
        said = done.stdout.splitlines()
        assert [line for line in lines if line not in said] == [], command
