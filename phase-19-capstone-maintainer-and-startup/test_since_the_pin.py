"""Lab 19-05 beside what it was cut from: all kept workloads, and the engine's own answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance import recording
from conformance.releases import builders, cut, differing
from conformance.replay import replay_files
from course.files import load_module
from mini_vllm.releases import parts_of


def test_neither_the_solution_nor_the_starter_uses_the_engines_own_answer():
    for name in ("solution.py", "starter.py"):
        text = (cut.LAB / name).read_text(encoding="utf-8")
        assert not re.search(r"import.*releases|releases.*import|v0_", text), name
    ours = load_module(cut.LAB / "solution.py").parts()
    theirs = parts_of("0.33.0")
    for part in ("block_pool", "scheduler", "request"):
        mine, other = getattr(ours, part), getattr(theirs, part)
        assert not {each.__module__ for each in mine.__mro__} & {other.__module__}


@pytest.mark.slow
def test_the_solution_decides_kept_workloads_as_recorded():
    """One in four; the engine's own parts, which decide alike, replay all of them."""
    parts = load_module(cut.LAB / "solution.py").parts()
    release = cut.RELEASE
    result = replay_files(
        [release.path], *builders(parts), select=lambda entry: entry["seed"] % 4 == 0,
        upstream=release.upstream,
    )  # fmt: skip
    assert (result.num_workloads, len(result.differences)) == (900, 0), result


@pytest.mark.slow
def test_the_cut_is_what_the_command_makes_and_the_page_says(tmp_path: Path):
    entries = list(recording.read(cut.RELEASE.path, cut.RELEASE.upstream))
    by_seed = {entry["seed"]: entry for entry in entries}
    page = (cut.LAB / "README.md").read_text(encoding="utf-8")
    for name, seeds in cut.kinds(differing.kept(cut.RELEASE.version), by_seed.keys()).items():
        kept = cut.chosen(seeds, cut.FIRST[name])
        recording.write(tmp_path / "cut.jsonl.gz", [by_seed[seed] for seed in kept])
        file = cut.LAB / "recordings" / f"{name}.jsonl.gz"
        assert file.read_bytes() == (tmp_path / "cut.jsonl.gz").read_bytes(), name
        assert f"| `{name}` | {len(seeds):,} | {len(kept)} |" in page
