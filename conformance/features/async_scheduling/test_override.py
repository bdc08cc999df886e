"""The recordings of lab 17-04 are what the releases do now."""

from __future__ import annotations

import gzip
import json

import pytest

from conformance.features.async_scheduling import override
from conformance.real_core import why_not


def kept(name):
    with gzip.open(override.LAB / "recordings" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def need(version):
    if problem := why_not(version):
        pytest.skip(problem)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.26.0", "0.27.0"])
def test_the_outcomes_of_the_release_that_holds_and_of_the_one_that_breaks(version):
    need(version)
    plain = [override.told(override.run(version, s, "none", None)) for s in override.SEEDS]
    for name, mixin in override.mixins().items():
        about = {"release": version, "device": "early", "scheduler": name}
        (row,) = [each for each in kept("outcomes") if about.items() <= each.items()]
        assert about | override.outcome(version, "early", mixin, plain) == row


@pytest.mark.slow
def test_the_frames_of_the_newest_release(monkeypatch):
    need("0.33.0")
    monkeypatch.setattr(override, "FRAMES_OF", ("0.33.0",))
    came = json.loads(json.dumps(list(override.frames())))
    assert came == [each for each in kept("frames") if each["release"] == "0.33.0"]
