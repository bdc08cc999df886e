"""The captured run of lab 10-02 against what its reference solution predicts today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from course.files import load_module

LAB = Path(__file__).parent / "labs" / "lab-02-two-way-tp"
OUTPUT = json.loads((LAB / "captured" / "cpu.json").read_text(encoding="utf-8"))["output"]
STARTS = OUTPUT.split("=== tensor_parallel_size=")[1:]


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_held_what_is_predicted(tp: int) -> None:
    run, lab = load_module(LAB / "run.py"), load_module(LAB / "solution.py")
    config = json.loads((run.MODEL / "config.json").read_text(encoding="utf-8"))
    for name, value in run.predicted(lab, config, tp, 4).items():
        for rank in range(tp):
            assert f"as predicted: rank {rank}, {name}: {value}\n" in STARTS[tp - 1]


def test_the_log_of_the_capture_is_read_rank_by_rank() -> None:
    lab = load_module(LAB / "solution.py")
    one, two = (lab.parse_log(start) for start in STARTS[:2])
    assert (one.world_size, one.pids, one.kv_tokens) == (1, {}, 262_144)
    assert (two.world_size, sorted(two.pids), two.kv_tokens) == (2, [0, 1], 524_288)
    assert len(set(two.pids.values())) == 2 and two.loaded_gib == {}


def test_the_stages_had_the_layers_that_lab_10_04_gives_them() -> None:
    lab = load_module(LAB.with_name("lab-04-pipeline-bubble") / "solution.py")
    layers = [list(range(*each)) for each in lab.split_layers(4, 2)]
    assert f"as predicted: layers of each stage: {layers}\n" in STARTS[2]


def test_the_control_failed_and_all_else_held() -> None:
    assert "they still do when both hold the KV head of rank 0: False\n" in STARTS[3]
    assert "NOT AS PREDICTED" not in OUTPUT and OUTPUT.endswith("all as predicted\n")
