"""GPU captures: written with their provenance, never over other hardware unasked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from course.conftest import HOLDER, REPOSITORY, held, read_until_gone
from course.learning import gpu
from course.learning.labs import find_labs
from labkit import versions

ONE = gpu.Hardware(("NVIDIA T4",), "550.1", ("15360 MiB",), "a CPU", 8)
OTHER = gpu.Hardware(("NVIDIA H200",), "570.2", ("143771 MiB",), "a CPU", 8)


@pytest.fixture
def lab(little_course):
    lab = find_labs(little_course)[0]
    (lab.folder / "run.py").write_text(
        "import sys\nfrom pathlib import Path\nprint('measured', *sys.argv[1:])\n"
        "print(Path(__file__).resolve())\n"
    )
    return lab


def on(monkeypatch, hardware: gpu.Hardware | None) -> None:
    monkeypatch.setattr(gpu, "hardware", lambda: hardware)


def captured(lab, name: str = "run") -> dict:
    return json.loads((lab.folder / "captured" / f"{name}.json").read_text())


def test_without_a_gpu_it_says_what_it_would_run(course, lab, monkeypatch):
    on(monkeypatch, None)
    ran = course("gpu", "run")
    assert ran.code == 0
    assert "python phase-90-little/labs/lab-00-blocks-0/run.py" in ran.out
    assert "run.json (not captured yet)" in ran.out
    assert not (lab.folder / "captured").exists()


def test_a_capture_holds_the_raw_output_and_where_it_came_from(course, lab, monkeypatch):
    on(monkeypatch, ONE)
    assert course("gpu", "run", "90-00", "--", "--batch", "8").code == 0
    capture = captured(lab)
    assert capture["output"].splitlines() == [
        "measured --batch 8",
        "phase-90-little/labs/lab-00-blocks-0/run.py",
    ]
    assert capture["command"] == "python phase-90-little/labs/lab-00-blocks-0/run.py --batch 8"
    assert (capture["gpus"], capture["driver"]) == (["NVIDIA T4"], "550.1")
    assert capture["cuda"] == versions.cuda()
    assert {"date", "seconds", "packages", "python", "run_py_sha256", "memory"} <= set(capture)


@pytest.mark.slow
def test_a_capture_of_other_hardware_is_kept_unless_forced(course, lab, monkeypatch):
    on(monkeypatch, ONE)
    course("gpu", "run", "90-00")
    on(monkeypatch, OTHER)
    ran = course("gpu", "run", "90-00")
    assert ran.code == 1 and "was captured on NVIDIA T4" in ran.out
    assert captured(lab)["gpus"] == ["NVIDIA T4"]
    assert course("gpu", "run", "90-00", "--force").code == 0
    assert captured(lab)["gpus"] == ["NVIDIA H200"]


@pytest.mark.slow
def test_another_name_keeps_both(course, lab, monkeypatch):
    on(monkeypatch, ONE)
    course("gpu", "run", "90-00")
    on(monkeypatch, OTHER)
    assert course("gpu", "run", "90-00", "--name", "h200").code == 0
    assert captured(lab)["gpus"] == ["NVIDIA T4"] and captured(lab, "h200")["driver"] == "570.2"


def test_a_run_that_fails_is_not_captured(course, lab, monkeypatch):
    (lab.folder / "run.py").write_text("print('half')\nraise SystemExit(3)\n")
    on(monkeypatch, ONE)
    ran = course("gpu", "run", "90-00")
    assert ran.code == 1 and "exit status 3; nothing was captured" in ran.out
    assert not (lab.folder / "captured").exists()


def test_a_lab_without_a_run_py_is_refused(course):
    ran = course("gpu", "run", "90-01")
    assert ran.code == 2 and "Lab 90-01 has no run.py" in ran.err


def allow_cpu(lab) -> None:
    manifest = lab.folder / "lab.yaml"
    manifest.write_text(manifest.read_text() + "run_on: [gpu, cpu]\n")


def install_vllm(monkeypatch, version: str) -> None:
    monkeypatch.setattr(versions, "vllm", lambda: version)


@pytest.mark.slow
def test_a_run_on_the_cpu_is_kept_beside_the_gpus_and_names_the_processor(course, lab, monkeypatch):
    allow_cpu(lab)
    on(monkeypatch, ONE)
    course("gpu", "run", "90-00")
    install_vllm(monkeypatch, "0.22.1+cpu")
    assert course("gpu", "run", "--cpu").code == 0  # the labs that can, and no others
    capture = captured(lab, "cpu")
    assert capture["gpus"] == [] and capture["processor"] and capture["cores"] >= 1
    assert captured(lab)["gpus"] == ["NVIDIA T4"]
    assert course("gpu", "run", "90-00", "--cpu").code == 0, "the same machine may run again"


def test_a_lab_that_needs_a_gpu_is_refused_on_the_cpu(course, lab, monkeypatch):
    install_vllm(monkeypatch, "0.22.1+cpu")
    ran = course("gpu", "run", "90-00", "--cpu")
    assert ran.code == 2 and "needs a GPU. These work with --cpu: none" in ran.err


def test_the_cpu_needs_the_cpu_build(course, lab, monkeypatch):
    allow_cpu(lab)
    install_vllm(monkeypatch, "0.22.1")
    ran = course("gpu", "run", "90-00", "--cpu")
    assert ran.code == 2 and "ends in +cpu; installed: 0.22.1" in ran.err
    assert not (lab.folder / "captured").exists()


@pytest.mark.slow
def test_without_a_gpu_it_names_the_labs_that_run_without_one(course, lab, monkeypatch):
    on(monkeypatch, None)
    assert "With --cpu" not in course("gpu", "run").out, "no lab of this course can"
    allow_cpu(lab)
    assert (
        "With --cpu, on vLLM's CPU build (course engine install): 90-00" in course("gpu", "run").out
    )


def second_lab(little_course):
    lab = find_labs(little_course)[1]
    (lab.folder / "run.py").write_text("print('the second')\n")
    return lab


@pytest.mark.slow
def test_all_runs_go_by_what_they_give_for_their_time(course, lab, little_course, monkeypatch):
    second = second_lab(little_course)
    on(monkeypatch, ONE)
    monkeypatch.setattr(gpu, "ORDER", ("90-01", "90-00"))
    assert course("gpu", "run", "--all").out.index("the second") >= 0
    order = sorted(
        [lab, second], key=lambda each: os.stat(each.folder / "captured" / "run.json").st_mtime_ns
    )
    assert [each.id for each in order] == ["90-01", "90-00"]
    (second.folder / "captured" / "run.json").rename(second.folder / "captured" / "kept.json")
    monkeypatch.setattr(gpu, "ORDER", ("90-00", "90-01"))
    out = course("gpu", "run", "--all").out
    assert out.index("90-01: kept") < out.index("90-00: kept"), "what is not captured yet is first"
    assert course("gpu", "run", "90-00", "--all").code == 2


@pytest.mark.slow
def test_one_run_that_fails_keeps_the_others_and_resuming_runs_it_alone(
    course, lab, little_course, monkeypatch
):
    second = second_lab(little_course)
    (lab.folder / "run.py").write_text("raise SystemExit('FlashInfer is not installed')\n")
    on(monkeypatch, ONE)
    ran = course("gpu", "run", "--all")
    assert ran.code == 1 and "Not captured: 90-00. To go on: course gpu run --resume" in ran.out
    assert captured(second)["output"] == "the second\n"
    (lab.folder / "run.py").write_text("print('mended')\n")
    ran = course("gpu", "run", "--resume")
    assert ran.code == 0 and "90-01: captured already" in ran.out
    assert captured(lab)["output"] == "mended\n"
    (second.folder / "run.py").write_text("print('another program')\n")
    course("gpu", "run", "--resume")
    assert captured(second)["output"] == "another program\n"


@pytest.mark.slow
def test_a_run_is_heard_while_it_runs(course, lab, monkeypatch, tmp_path):
    heard, go_on = tmp_path / "heard", tmp_path / "go on"
    (lab.folder / "run.py").write_text(
        "import pathlib, time\nprint('batch 1')\n"
        f"while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)\n"
    )
    on(monkeypatch, ONE)
    real = gpu.heard

    def listening(console):
        echo = real(console)

        def listen(chunk):
            echo(chunk)
            with heard.open("ab") as file:
                file.write(chunk)
            go_on.touch()  # the run ends only when something of it has been heard

        return listen

    monkeypatch.setattr(gpu, "heard", listening)
    ran = course("gpu", "run", "90-00", "--time-limit", "60")
    assert ran.code == 0 and "batch 1" in ran.out and heard.read_bytes() == b"batch 1\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are adopted on Linux")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("usual_signals")
def test_a_run_that_is_ended_leaves_no_process(lab, little_course, tmp_path, number):
    path = held(tmp_path)
    waits = "import time\ntime.sleep(600)\n"
    (lab.folder / "run.py").write_text(HOLDER.format(path=str(path)) + waits)
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 'NVIDIA T4, 550.1, 15360 MiB'\n")
    driver.chmod(0o755)
    environment = {**os.environ, "PATH": f"{driver.parent}:{os.environ['PATH']}",
                   "COURSE_ROOT": str(little_course), "PYTHONPATH": str(REPOSITORY)}  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "course.cli", "gpu", "run", "90-00"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        pipe = os.open(path, os.O_RDONLY)  # returns when run.py has opened the other end
        while os.read(pipe, 100) != b"ready":
            pass
        process.send_signal(number)
        assert read_until_gone(pipe) == b""
    assert not (lab.folder / "captured").exists()
