"""What a site gets to run Python: every file a page may open, under its hash, and nothing twice."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from importlib.util import cache_from_source, source_from_cache
from pathlib import Path

import pytest

from course.learning.labs import find_labs
from course.site import play, play_excepted, play_payload, real_payload
from course.truth import pages

ROOT = Path(__file__).resolve().parents[2]


def opened(path):
    return zipfile.ZipFile(io.BytesIO(gzip.decompress(path.read_bytes())))


def pretended(command, cwd):
    """The compiler: each source's compiled module is its text, under Python's name for it."""
    (job,) = json.loads(Path(command[2]).read_text(encoding="utf-8"))["archives"]
    assert (job["place"], job["beside"]) == ("/course", True)
    with zipfile.ZipFile(job["from"]) as archive:
        files = [(cache_from_source(name), archive.read(name)) for name in archive.namelist()]
    Path(job["to"]).write_bytes(play.zipped(files))
    return ""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The `play` folder of a site, over a pretended runtime; and what its index says."""
    root = tmp_path_factory.mktemp("root")
    made = root / "made"
    (made / "core").mkdir(parents=True)
    for name in play.CORE:
        (made / "core" / name).write_text(name, encoding="utf-8")
    for name in ("numpy.zip", "tools.zip", f"core/{play.STDLIB}"):
        (made / name).write_bytes(play.zipped([("module.pyc", name.encode())]))
    (made / "editor.mjs").write_text("editor", encoding="utf-8")
    (made / "licences").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "folder", lambda _: made)
        patch.setattr(play, "_run", pretended)
        version = play_payload.write(ROOT, root / "play")
        assert play_payload.write(ROOT, root / "again") == version
    return root / "play"


@pytest.fixture(scope="module")
def config(played):
    line = (played / "index.js").read_text(encoding="utf-8").splitlines()[1]
    return json.loads(line.removeprefix("window.COURSE_PLAY = ").removesuffix(";"))


@pytest.mark.slow
def test_every_name_but_the_index_has_the_contents_hash(played):
    for path in played.rglob("*"):
        name = path.relative_to(played).as_posix()
        is_read_by_people = name.startswith("licences/")
        if path.is_file() and name != "index.js" and not is_read_by_people:
            assert re.search(r"[-/][0-9a-f]{12}[./]", name), name


def test_every_file_the_index_names_is_there_with_its_size(played, config):
    parts = ("library", "numpy", "tools")
    named = [config["course"], config["catalog"], *(config["runtime"][part] for part in parts)]
    named += [{"file": lab["file"], "bytes": lab["bytes"]} for lab in config["labs"].values()]
    for each in named:
        assert (played / each["file"]).stat().st_size == each["bytes"], each
    for name in ("worker", "editor"):
        assert (played / config[name]).is_file()
    for name, size in config["runtime"]["files"].items():
        assert (played / config["runtime"]["folder"] / name).stat().st_size == size


def test_the_library_comes_as_files_beside_an_empty_archive_of_it(played, config):
    runtime = config["runtime"]
    with opened(played / runtime["library"]["file"]) as archive:
        assert archive.namelist() == ["module.pyc"]
    assert zipfile.ZipFile(played / runtime["folder"] / play.STDLIB).namelist() == []


def test_every_lab_is_there_with_its_starter_its_solution_and_its_tests(played, config):
    assert config["labs"].keys() == {lab.id for lab in find_labs(ROOT)}
    for lab in config["labs"].values():
        with opened(played / lab["file"]) as archive:
            for name in ("starter.py", "solution.py", "test_lab.py"):
                path = f"{lab['folder']}/{name}"
                assert archive.read(path) == (ROOT / path).read_bytes()
            assert cache_from_source(f"{lab['folder']}/test_lab.py") in archive.namelist()


def test_a_file_of_the_engine_comes_with_the_first_run_or_when_it_is_opened(played, config):
    catalogue = json.loads((played / config["catalog"]["file"]).read_text(encoding="utf-8"))
    with opened(played / config["course"]["file"]) as archive:
        first = set(archive.namelist())
    assert not first & catalogue.keys()
    wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / "mini_vllm").rglob("*.py")
              if "tests" not in p.parts}  # fmt: skip
    wanted |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "conformance").glob("*.py")
               if not p.name.startswith(("test_", "conftest"))}  # fmt: skip
    assert wanted <= first | catalogue.keys()


def test_what_every_grading_imports_comes_compiled_beside_its_source(played, config):
    with opened(played / config["course"]["file"]) as archive:
        names = set(archive.namelist())
    compiled = {name for name in names if name.endswith(".pyc")}
    assert {source_from_cache(name) for name in compiled} <= names
    assert {cache_from_source(name) for name in ("mini_vllm/engine.py", "course/play/worker.py",
            "course/learning/runner.py", "labkit/__init__.py", "conftest.py")
           } <= compiled  # fmt: skip
    assert not any("structured_output" in name for name in compiled)  # not at every grading


def test_what_is_opened_later_is_byte_for_byte_the_courses(played, config):
    catalogue = json.loads((played / config["catalog"]["file"]).read_text(encoding="utf-8"))
    assert "models/byte-llama/model.safetensors" in catalogue
    for path, (file, size) in catalogue.items():
        data = (played / file).read_bytes()
        assert len(data) == size, path
        if not path.startswith(real_payload.FOLDER):  # packed when the site is made
            assert data == (ROOT / path).read_bytes(), path


def test_the_first_run_brings_no_model_and_no_recording(config):
    assert config["course"]["bytes"] < 800_000  # 400,000 of sources, the rest compiled
    assert max(lab["bytes"] for lab in config["labs"].values()) < 200_000


def test_no_tests_of_the_engine_and_no_pages_are_shipped(played, config):
    catalogue = json.loads((played / config["catalog"]["file"]).read_text(encoding="utf-8"))
    assert not [name for name in catalogue if name.endswith((".md", ".svg"))]
    assert not [name for name in catalogue if Path(name).name.startswith("test_") and
                name.endswith(".py")]  # fmt: skip


def test_the_bytes_of_each_model_are_told(config):
    size = (ROOT / "models" / "byte-llama" / "model.safetensors").stat().st_size
    assert size < config["models"]["byte-llama"] < size + 100_000


def test_a_page_loads_the_index_before_the_books_own_scripts(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<body>\n  <!-- Custom JS scripts -->\n<script src='a'></script></body>", "utf-8"
    )
    play_payload.link(page, "../", "abc")
    text = page.read_text(encoding="utf-8")
    assert text.index('<script src="../play/index.js?v=abc">') < text.index("<!-- Custom")


def test_without_a_runtime_a_site_stays_as_it_is(tmp_path):
    page = tmp_path / "site" / "index.html"
    page.parent.mkdir()
    page.write_text("<body></body>", encoding="utf-8")
    (tmp_path / "book" / "play").mkdir(parents=True)
    for name in ("editor.js", "compile.mjs"):
        (tmp_path / "book" / "play" / name).write_text(name, encoding="utf-8")
    assert not play_payload.install(tmp_path, page.parent)
    assert page.read_text(encoding="utf-8") == "<body></body>"


def test_the_excepted_tests_are_tests_of_their_labs():
    labs = {lab.id: lab for lab in find_labs(ROOT)}
    for lab, tests in play_excepted.TESTS.items():
        assert tests.keys() <= set(labs[lab].test_names()), lab


def test_the_excepted_blocks_are_blocks_of_their_pages():
    for page, blocks in play_excepted.BLOCKS.items():
        count = len(pages.runnable(ROOT / page))
        assert {int(index) for index in blocks} <= set(range(count)), page


def test_the_client_is_small():
    assert (ROOT / "book" / "play" / "client.js").stat().st_size < 6000
