"""The two races without a GPU: rightness, refusals, the pinned kernels, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course.challenges.gpu import pinned, race, shown
from course.learning.labs import CourseError
from course.terminal import make_console
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
ROOT = race.ROOT
TREE = ROOT / "upstream"
needs_pin = pytest.mark.skipif(not (TREE / pinned.OPS).is_dir(), reason="the pinned tree")

AGAINST_FLOAT64 = """
import json, sys
from pathlib import Path
from course.challenges.gpu import pinned, race

harness = race.load_module(race.LAB / "harness.py", "paged_harness")
tensors = harness.make_tensors(harness.Case((1, 15, 130), 32, 8, 128, 16, "float32"), "cpu")
launch = race.vllm_attention(pinned.unified_attention(Path(sys.argv[1])), tensors, 130)
print(abs(launch().double().numpy() - harness.reference(tensors)).max())
"""


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process in which Triton's kernels are interpreted."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip


def raced(tmp_path: Path, name: str, text: str) -> dict:
    file, out = tmp_path / "answer.py", tmp_path / "out.json"
    file.write_text(text, encoding="utf-8")
    child("-m", "course.challenges.gpu.race", name, str(file), "--dry-run", "--out", str(out))
    return json.loads(out.read_text(encoding="utf-8"))


@needs_pin
@pytest.mark.torch
@pytest.mark.slow
def test_the_pinned_attention_is_that_of_float64():
    pytest.importorskip("triton")
    ran = child("-c", AGAINST_FLOAT64, str(TREE))
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert float(ran.stdout) < 1e-5


@needs_pin
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"), [("paged", "starter"), ("paged", "reference"), ("tile", "reference")]
)
def test_what_is_shipped_is_right(tmp_path, name, which):
    """The tile's part also holds the pinned kernel to both products of a small layer."""
    pytest.importorskip("triton")
    found = raced(tmp_path, name, f"from course.challenges.gpu.{name}.{which} import *\n")
    assert found["why"] == ""


@needs_pin
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("masked_fill(~real[:, None, None, :], -math.inf)", "nan_to_num()", "from float64"),
        ("reshape(num_seqs, num_heads, head_dim)", "flatten(2)", "the result is"),
    ],
)
def test_a_wrong_kernel_is_not_timed(tmp_path, old, new, why):
    pytest.importorskip("triton")
    text = (HERE / "paged" / "starter.py").read_text(encoding="utf-8")
    assert old in text
    assert why in raced(tmp_path, "paged", text.replace(old, new))["why"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"BLOCK_SIZE_K": 32', '"BLOCK_SIZE_K": 48', "BLOCK_SIZE_K is 48"),
        ('"BLOCK_SIZE_K": 32, ', "", "need a dict of"),
        ('"num_warps": 4', '"num_warps": 4.0', "num_warps is 4.0"),
        ('"num_stages": 3', '"num_stages": 9', "num_stages is 9"),
    ],
)
def test_a_tile_that_cannot_be_launched_is_named(tmp_path, old, new, why):
    text = (HERE / "tile" / "starter.py").read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "answer.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(race.Wrong, match=why):
        race.Tile(TREE).check(load_module(file, "an_answer"), "cuda")


@needs_pin
def test_the_tile_is_the_table_s_nearest_and_the_rule_s_without_a_table():
    layer = (race.EXPERTS, race.WIDTH, race.HIDDEN, race.TOP_K)
    tuned = pinned.table(TREE, race.EXPERTS, race.WIDTH, "NVIDIA H100 80GB HBM3")
    assert pinned.tile_of(TREE, 3000, *layer, "NVIDIA H100 80GB HBM3") == tuned[3072]
    assert pinned.table(TREE, race.EXPERTS, race.WIDTH, "NVIDIA H200 NVL") != {}
    rule = pinned.tile_of(TREE, 1, *layer, "a card without a table")
    assert (rule["BLOCK_SIZE_M"], rule["num_stages"]) == (16, 4)
    assert sorted(rule) == sorted(race.Tile.FIELDS)


@needs_pin
def test_a_definition_that_is_not_there_is_named():
    with pytest.raises(LookupError, match="does not define nothing_here"):
        pinned.functions(TREE / pinned.EXPERTS / "fused_moe.py", ["nothing_here"])


def test_a_score_is_the_geometric_mean_of_median_ratios():
    rows = [{"ratios": [0.1, 2.0, 9.0]}, {"ratios": [0.5, 0.5, 0.4]}]
    assert race.score(rows) == 1000


def test_without_a_gpu_nothing_is_scored_and_the_dry_run_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(shown.gpu, "hardware", lambda: None)
    with pytest.raises(CourseError, match=r"TRITON_INTERPRET=1 python -m .*race paged .*--dry-run"):
        shown.check(make_console(), tmp_path, shown.load("paged"), "")


def test_marks_are_shares_of_vllm_s_speed():
    tile = shown.load("tile")
    assert tile.marks(799, shown.VLLM) == []
    assert tile.marks(1000, shown.VLLM) == ["bronze", "vLLM's"]
