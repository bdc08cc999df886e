"""The recordings of the rooms and of labs 19-02 to 19-04 are what releases' own code decides."""

from __future__ import annotations

import pytest

from conformance.museum import recorder
from conformance.real_core import why_not


@pytest.mark.slow
def test_what_is_shown_and_graded_by_is_what_the_releases_decide(tmp_path):
    for version in (*recorder.OLDER, *recorder.NEEDED):
        if problem := why_not(version):
            pytest.skip(problem)
    for folder, made in recorder.FILES:
        recorder.write(tmp_path / folder.parent.name, made())
        for path in (tmp_path / folder.parent.name).iterdir():
            kept = folder / path.name
            assert kept.read_bytes() == path.read_bytes(), kept
