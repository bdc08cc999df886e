"""The runtime of the pages: fetched whole or not at all; here npm, pip and Node are pretended."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from course.learning.labs import CourseError
from course.site import play, play_licences
from course.site.play_lock import BUNDLER, CARRIER, EDITOR, NUMPY, PYODIDE, TOOLS

ROOT = Path(__file__).resolve().parents[2]


def wheel(*files: str, held: dict[str, bytes] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in (*files, "x.dist-info/licenses/LICENSE"):
            archive.writestr(name, f"# {name}")
        for name, data in (held or {}).items():
            archive.writestr(name, data)
    return out.getvalue()


def packed(*files: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in (*files, "LICENSE"):
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return out.getvalue()


class World:
    """What npm and the package index hold, and what Node does; `ran` is what was asked of them."""

    def __init__(self) -> None:
        numpy = wheel("numpy/__init__.py", "numpy/tests/test_a.py", "numpy/_core/a.so",
                      "numpy/_core/include/a.h", "numpy/f2py/a.py", "numpy/a.pyi",
                      *play.UNSAID)  # fmt: skip
        carried = {play.CARRIED + name: wheel() for name in play_licences.FROM_CARRIER}
        self.wheels = {pin.name: wheel(f"{pin.name}/__init__.py") for pin in TOOLS}
        self.wheels[CARRIER.name] = wheel(held={**carried, play.CARRIED + NUMPY.name: numpy})
        self.tars = {pin.name: packed("index.js") for pin in (BUNDLER, *EDITOR)}
        self.tars[PYODIDE.name] = packed(*play.CORE)
        self.numpy = numpy
        self.ran: list[list[str]] = []
        self.fails = ""

    def run(self, command, cwd: Path) -> str:
        self.ran.append(list(command))
        if self.fails and self.fails in " ".join(command):
            raise CourseError(f"{self.fails} ended with 1; is there a network?")
        if command[1] == "pack":
            for pin in (PYODIDE, BUNDLER, *EDITOR):
                (cwd / pin.npm).write_bytes(self.tars[pin.name])
        elif "download" in command:
            into = Path(command[command.index("--dest") + 1])
            wanted = Path(command[-1]).read_text(encoding="utf-8")
            for pin in (CARRIER, *TOOLS):
                if f"{pin.name}==" in wanted:
                    name = f"{pin.name.replace('-', '_')}-{pin.version}-py3-none-any.whl"
                    (into / name).write_bytes(self.wheels[pin.name])
        elif command[1].endswith("compile.mjs"):
            for job in json.loads(Path(command[2]).read_text(encoding="utf-8"))["archives"]:
                Path(job["to"]).write_bytes(b"compiled " + Path(job["from"]).read_bytes())
        else:
            out = next(part for part in command if part.startswith("--outfile="))
            Path(out.partition("=")[2]).write_text("export { createEditor }", encoding="utf-8")
        return ""

    def pins(self, monkeypatch) -> None:
        """Make the archives of this world the pinned ones."""

        def npm(pin):
            digest = base64.b64encode(hashlib.sha512(self.tars[pin.name]).digest()).decode()
            return dataclasses.replace(pin, digest=f"sha512-{digest}")

        def index(pin, data):
            return dataclasses.replace(pin, digest=hashlib.sha256(data).hexdigest())

        for name, pins in (("PYODIDE", PYODIDE), ("BUNDLER", BUNDLER), ("EDITOR", EDITOR)):
            value = tuple(map(npm, pins)) if isinstance(pins, tuple) else npm(pins)
            monkeypatch.setattr(play, name, value)
        tools = tuple(index(pin, self.wheels[pin.name]) for pin in TOOLS)
        monkeypatch.setattr(play, "TOOLS", tools)
        monkeypatch.setattr(play, "CARRIER", index(CARRIER, self.wheels[CARRIER.name]))
        monkeypatch.setattr(play, "NUMPY", index(NUMPY, self.numpy))


@pytest.fixture
def world(monkeypatch) -> World:
    made = World()
    made.pins(monkeypatch)
    monkeypatch.setattr(play.shutil, "which", lambda name: f"/usr/bin/{name}")
    return made


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "book" / "play").mkdir(parents=True)
    for name in ("editor.js", "compile.mjs"):
        (tmp_path / "book" / "play" / name).write_text(name, encoding="utf-8")
    return tmp_path


def make(root, world, said=None) -> bool:
    return play.make(root, (said if said is not None else []).append, world.run)


def test_what_is_made_is_whole(root, world):
    assert play.problem(root) == "it is not there"
    assert make(root, world)
    assert play.problem(root) == ""


def test_a_second_call_does_nothing(root, world):
    make(root, world)
    world.ran.clear()
    assert not make(root, world)
    assert world.ran == []


def test_a_file_that_was_changed_is_made_anew(root, world):
    make(root, world)
    (play.folder(root) / "editor.mjs").write_text("else", encoding="utf-8")
    assert play.problem(root) == "editor.mjs is missing or was changed"
    assert make(root, world) and play.problem(root) == ""


def test_another_editor_is_made_anew(root, world):
    make(root, world)
    (root / "book" / "play" / "editor.js").write_text("another", encoding="utf-8")
    assert play.problem(root) == "it was made of other versions"


@pytest.mark.parametrize("name", [PYODIDE.name, "codemirror", "@lezer/lr"])
def test_an_archive_of_npm_with_other_bytes_is_refused_by_its_name(root, world, name):
    world.tars[name] += b"more"
    with pytest.raises(CourseError, match=f"{name} .* has another digest than the pin"):
        make(root, world)
    assert not play.folder(root).exists()


@pytest.mark.parametrize("name", [CARRIER.name, "pytest"])
def test_a_wheel_with_other_bytes_is_refused_by_its_name(root, world, name):
    world.wheels[name] += b"more"
    with pytest.raises(CourseError, match=f"{name} .* has another digest than the pin"):
        make(root, world)


def test_numpy_with_another_hash_inside_the_right_wheel_is_refused(root, world, monkeypatch):
    monkeypatch.setattr(play, "NUMPY", dataclasses.replace(NUMPY, digest="0" * 64))
    with pytest.raises(CourseError, match=r"numpy.* has another digest than the pin"):
        make(root, world)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["npm pack", "download", "compile.mjs", "esbuild"])
def test_a_step_that_fails_leaves_what_was_there(root, world, step):
    make(root, world)
    (root / "book" / "play" / "editor.js").write_text("another", encoding="utf-8")
    before = sorted(play.folder(root).rglob("*"))
    world.fails = step
    with pytest.raises(CourseError, match="is there a network"):
        make(root, world)
    assert sorted(play.folder(root).rglob("*")) == before
    assert list(play.folder(root).parent.iterdir()) == [play.folder(root)]


@pytest.mark.parametrize("program", ["npm", "node"])
def test_a_missing_program_is_named_with_where_it_comes_from(root, world, monkeypatch, program):
    monkeypatch.setattr(play.shutil, "which", lambda name: None if name == program else name)
    with pytest.raises(CourseError, match=f"{program} is not installed.*nodejs.org"):
        make(root, world)
    assert world.ran == []


def test_a_command_that_fails_shows_its_last_lines(tmp_path):
    code = "import sys; print('no route to host', file=sys.stderr); sys.exit(7)"
    with pytest.raises(CourseError, match=r"(?s)ended with 7; is there a network.*no route"):
        play._run([sys.executable, "-c", code], tmp_path)


def test_pip_is_this_environments_or_uvs_or_a_new_ones(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(play.importlib.util, "find_spec", lambda name: name)
    assert play.pip_command(tmp_path, ran.append) == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(play.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(play.shutil, "which", lambda name: "/bin/uv")
    assert play.pip_command(tmp_path, ran.append) == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr(play.shutil, "which", lambda name: None)
    command = play.pip_command(tmp_path, lambda command, cwd: ran.append(command))
    assert ran == [[sys.executable, "-m", "venv", str(tmp_path / "pip")]]
    assert Path(command[0]).is_relative_to(tmp_path / "pip") and command[1:] == ["-m", "pip"]


def test_no_command_names_an_index_and_every_wheel_is_asked_for_with_its_hash(root, world):
    make(root, world)
    assert not any("://" in part for command in world.ran for part in command)
    downloads = [command for command in world.ran if "download" in command]
    assert all({"--require-hashes", "--no-deps"} <= set(command) for command in downloads)


def test_numpy_comes_without_tests_headers_what_compiles_and_docstrings(world):
    files = dict(play.numpy_files(world.numpy))
    assert files.keys() == {"numpy/__init__.py", "numpy/_core/a.so", *play.UNSAID}
    assert {name for name, data in files.items() if not data} == set(play.UNSAID)


def test_of_pygments_come_the_names_that_pytest_imports(world):
    files = dict(play.tool_files({pin.name: wheel(f"{pin.name}/__init__.py") for pin in TOOLS}))
    assert "pytest/__init__.py" in files
    assert files["pygments/lexers/diff.py"] == b"DiffLexer = None\n"


def test_the_same_files_are_the_same_archive():
    files = [("b.py", b"b"), ("a.py", b"a")]
    assert play.zipped(files) == play.zipped(reversed(files))


def test_every_licence_of_what_is_served_is_beside_it(root, world):
    make(root, world)
    licences = play.folder(root) / "licences"
    listed = (licences / "index.txt").read_text(encoding="utf-8")
    for pin in (PYODIDE, *TOOLS, *EDITOR):
        assert f"{pin.version}\n" in listed.replace(f"{pin.name} ", "", 1), pin.name
    for name in [line.split("(")[-1].split(")")[0] for line in listed.splitlines()
                 if line.startswith("    licence:")]:  # fmt: skip
        assert "LICENSE" in (licences / name).read_text(encoding="utf-8")


def test_an_archive_without_a_licence_is_not_shipped(root, world):
    with pytest.raises(ValueError, match="no licence"):
        play_licences._joined({})
