"""The recordings of labs 19-02 to 19-04 are what the recorder makes of the releases' code."""

from __future__ import annotations

import pytest

from conformance.museum import recorder
from conformance.real_core import why_not


@pytest.mark.slow
def test_what_the_labs_grade_by_is_what_the_releases_decide(tmp_path):
    for version in (*recorder.NEEDED, "0.11.1"):
        if problem := why_not(version):
            pytest.skip(problem)
    for folder, made in recorder.LABS_FILES:
        recorder.write(tmp_path / folder.parent.name, made())
        for path in (tmp_path / folder.parent.name).iterdir():
            kept = folder / path.name
            assert kept.read_bytes() == path.read_bytes(), kept
