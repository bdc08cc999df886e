"""Without a GPU: arithmetic against what the GPU's log said, tables against files, a dry run."""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import kernels, models, tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["bf16", "moe"])
def test_the_weights_are_as_heavy_as_the_log_says(name):
    (line,) = [x for x in tables.load("models")["arms"][name]["log"] if "Model loading took" in x]
    gib = float(re.search(r"took ([\d.]+) GiB", line)[1])
    predicted = 2 * sum(models.parameters(models.ARMS[name][0]).values()) / 2**30
    assert predicted == pytest.approx(gib, abs=0.02)


@pytest.mark.parametrize("name", ["bf16", "moe"])
def test_the_measured_model_is_the_one_the_program_asks_for(name):
    recorded = tables.load("models")["arms"][name]["config"]
    recorded = {key: value for key, value in recorded.items() if key != "weights"}
    assert recorded.items() <= models.ARMS[name][0].items()


def test_no_step_is_faster_than_its_weights_can_be_read():
    copy = tables.load("kernels")["copy_bytes_per_s"]
    for name, arm in tables.load("models")["arms"].items():
        for batch, times in arm["decode_ms"].items():
            floor = models.step_floor_ms(models.ARMS[name][0], int(batch), copy)
            assert floor < statistics.median(times) < 4 * floor, (name, batch)


def test_a_token_touches_its_own_experts_and_many_touch_all():
    assert models.experts_touched(models.MOE, 1) == pytest.approx(8)
    assert models.experts_touched(models.MOE, 2) == pytest.approx(15.5)
    assert models.experts_touched(models.MOE, 10_000) == pytest.approx(128)


def test_an_engine_that_cannot_start_is_named_and_the_next_arm_runs(tmp_path, monkeypatch, capsys):
    ran = iter([
        models.processes.Ran(("python",), 1, "CUDA out of memory\n"),
        models.processes.Ran(("python",), 0, 'RESULT {"start_s": 1.0}\n'),
    ])  # fmt: skip
    monkeypatch.setattr(models.versions, "vllm", lambda: "0.22.1")
    monkeypatch.setattr(models.processes, "start", lambda command: next(ran))
    out = tmp_path / "models.json"
    assert models.main(["bf16", "moe", "--out", str(out)]) == 1
    assert "bf16: nothing kept" in capsys.readouterr().out
    assert models.json.loads(out.read_text())["arms"] == {"moe": {"start_s": 1.0}}


def test_shapes_and_bytes_are_those_of_the_results():
    lab = kernels.load_module(kernels.LAB / "solution.py")
    rows = tables.load("kernels")["rows"]
    assert [(row["batch"], row["context"]) for row in rows] == list(kernels.SHAPES)
    for row in rows:
        assert kernels.must_move(lab, row["batch"], row["context"], 2) == row["must_bytes"]


def test_shares_are_the_bytes_over_the_times():
    found = tables.load("kernels")
    for row in found["rows"]:
        for name in tables.KERNELS:
            share = row["must_bytes"] / (row[name]["us"] * 1e-6) / found["copy_bytes_per_s"]
            assert row[name]["share_of_copy"] == pytest.approx(share)
            assert row[name]["graph_us"] > 0.95 * row[name]["us"], "the README says so"


def test_the_tables_of_the_readme_are_those_of_the_files(tmp_path, monkeypatch):
    copy = tmp_path / "README.md"
    copy.write_text(tables.README.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(tables, "README", copy)
    assert tables.main(["--write"]) == 0
    assert copy.read_text(encoding="utf-8") == (tables.HERE / "README.md").read_text("utf-8")


def test_without_a_gpu_nothing_is_measured(capsys, tmp_path):
    assert models.main(["moe", "--dry-run"]) == 0
    assert "29.01 GiB" in capsys.readouterr().out
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA GPU"):
            kernels.main(["--out", str(tmp_path / "k.json")])


@pytest.mark.torch
def test_the_kernel_runs_interpreted():
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.kernels", "--dry-run"], cwd=ROOT, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, timeout=300,
        check=True,
    )  # fmt: skip
    difference = float(re.search(r"from float64 (\S+)$", ran.stdout.strip())[1])
    assert difference < 1e-5
