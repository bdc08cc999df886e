"""The fetcher never leaves a tree that is not the pinned one."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from course.truth import upstream


def write_tree(tree: Path, version: str = "0.22.1", commit: str = "g0decac0d9") -> None:
    for name in upstream.NEEDED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    (tree / "vllm" / "_version.py").write_text(
        f"__version__ = version = '{version}'\n__commit_id__ = commit_id = '{commit}'\n"
    )


def write_archive(archive: Path, top: str = "vllm-0.22.1") -> None:
    files = {name: b"" for name in upstream.NEEDED if "." in name}
    files["csrc/cache_kernels.cu"] = b""
    files["vllm/_version.py"] = b"version = '0.22.1'\ncommit_id = 'g0decac0d9'\n"
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The git host refuses; the index gives whatever a test puts there."""

    def refuse(target: Path) -> None:
        raise subprocess.CalledProcessError(128, "git", stderr="fatal: could not resolve host")

    monkeypatch.setattr(upstream, "_clone", refuse)


def serve(monkeypatch: pytest.MonkeyPatch, pinned: bool = True) -> None:
    def download(archive: Path, sha256: str | None, say: upstream.Progress) -> str:
        write_archive(archive)
        if pinned:
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            monkeypatch.setattr(upstream, "SDIST_SHA256", digest)
        return upstream._check_sha256(archive, upstream.SDIST_SHA256)

    monkeypatch.setattr(upstream, "_download_sdist", download)


def test_verify_names_the_command_when_the_tree_is_absent(tmp_path: Path) -> None:
    status = upstream.verify(tmp_path)
    assert (status.ok, "course upstream fetch" in status.detail) == (False, True)


def test_verify_accepts_the_pinned_version_and_commit(tmp_path: Path) -> None:
    write_tree(tmp_path / "upstream")
    assert upstream.verify(tmp_path) == upstream.Status(
        True, "upstream/ is vLLM 0.22.1 (0decac0d9)"
    )


@pytest.mark.parametrize(
    ("version", "commit"), [("0.22.0", "g0decac0d9"), ("0.22.1", "g0000000000"), ("", "")]
)
def test_verify_refuses_another_version_or_commit(
    tmp_path: Path, version: str, commit: str
) -> None:
    write_tree(tmp_path / "upstream", version, commit)
    assert not upstream.verify(tmp_path).ok


def test_verify_names_what_an_incomplete_tree_lacks(tmp_path: Path) -> None:
    write_tree(tmp_path / "upstream")
    (tmp_path / "upstream" / "vllm/v1/core/sched/scheduler.py").unlink()
    assert "vllm/v1/core/sched/scheduler.py is missing" in upstream.verify(tmp_path).detail


def test_verify_does_not_take_the_commit_of_the_repository_around_it(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "upstream" / "vllm").mkdir(parents=True)
    assert "unknown commit" in upstream.verify(tmp_path).detail


@pytest.mark.usefixtures("offline")
def test_fetch_falls_through_to_the_sdist_and_leaves_only_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch)
    lines: list[str] = []
    assert upstream.fetch(tmp_path, lines.append) == "sdist vllm-0.22.1.tar.gz"
    assert upstream.verify(tmp_path).ok
    assert [entry.name for entry in tmp_path.iterdir()] == ["upstream"]
    assert "could not resolve host" in lines[1]


@pytest.mark.usefixtures("offline")
def test_fetch_refuses_an_archive_of_another_sha256(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, pinned=False)
    with pytest.raises(upstream.UpstreamError, match="nothing was unpacked"):
        upstream.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("offline")
def test_an_interrupted_download_leaves_no_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(archive: Path, sha256: str | None, say: upstream.Progress) -> str:
        archive.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(upstream, "_download_sdist", interrupt)
    with pytest.raises(KeyboardInterrupt):
        upstream.fetch(tmp_path)
    assert not upstream.verify(tmp_path).ok
    assert list(tmp_path.iterdir()) == []


def test_fetch_does_not_replace_another_tree(tmp_path: Path) -> None:
    write_tree(tmp_path / "upstream", version="0.21.0")
    with pytest.raises(upstream.UpstreamError, match="Move it away"):
        upstream.fetch(tmp_path)
    assert "0.21.0" in upstream.verify(tmp_path).detail


def test_fetch_does_nothing_when_the_tree_is_there(tmp_path: Path) -> None:
    write_tree(tmp_path / "upstream")
    assert upstream.fetch(tmp_path) == "already there"


def test_a_clone_of_another_commit_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "_clone", lambda target: write_tree(target, "0.22.2"))
    with pytest.raises(upstream.UpstreamError, match="not the pinned tree"):
        upstream.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_release_is_fetched_beside_the_pin_by_its_sha256(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(archive: Path, sha256: str | None, say: upstream.Progress) -> str:
        asked.append((archive.name, sha256))
        archive.write_bytes((tmp_path / "same.tar.gz").read_bytes())
        return upstream._check_sha256(archive, sha256 or "0" * 64)

    monkeypatch.setattr(upstream, "_download_sdist", download)
    write_archive(tmp_path / "same.tar.gz")
    with pytest.raises(upstream.UpstreamError, match="nothing was unpacked"):
        upstream.fetch_release(tmp_path, "9.9.9", None)
    assert not upstream.release_tree(tmp_path, "9.9.9").exists()
    digest = hashlib.sha256((tmp_path / "same.tar.gz").read_bytes()).hexdigest()
    tree, found = upstream.fetch_release(tmp_path, "9.9.9", digest)
    assert (tree / "vllm" / "_version.py").is_file() and found == digest
    assert upstream.fetch_release(tmp_path, "9.9.9", digest) == (tree, "")  # there already
    assert asked == [("vllm-9.9.9.tar.gz", None), ("vllm-9.9.9.tar.gz", digest)]
