"""No file grows past what a reader holds: 500 lines here and in conformance, 400 in mini_vllm."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"course": 500, "conformance": 500, "mini_vllm": 400}


@pytest.mark.parametrize("folder", LIMITS)
def test_no_file_is_longer_than_its_limit(folder):
    files = [path for path in (ROOT / folder).rglob("*.py") if "testdata" not in path.parts]
    assert files
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    over = {
        str(path.relative_to(ROOT)): lines
        for path, lines in lengths.items()
        if lines > LIMITS[folder]
    }
    assert not over, f"split: {over}"
