"""Every feature: each of its situations occurs in its recordings, and its page counts them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from conformance import recording, situations
from conformance.features import FOLDER, holding
from conformance.features.core.situations import COUNTED
from conformance.prefixes import entries

FEATURES = {room: module.COUNTED for room, module in holding("situations").items()}


@pytest.mark.parametrize(
    "room", ["core", *(pytest.param(r, marks=pytest.mark.slow) for r in FEATURES if r != "core")]
)
def test_every_situation_occurs_in_the_recordings_of(room: str) -> None:
    counted = FEATURES[room]
    missing = set(counted.meanings)
    for several in zip(*map(entries, counted.files), strict=False):  # one of each: soon complete
        missing -= set().union(*map(counted.situations_of, several))
        if not missing:
            break
    assert not missing, f"the recordings no longer hold: {sorted(missing)}"


@pytest.mark.parametrize("room", FEATURES)
def test_the_page_of_the_feature_lists_every_situation(room: str) -> None:
    page = (FOLDER / room / "README.md").read_text(encoding="utf-8")
    for name, meaning in FEATURES[room].meanings.items():
        assert f"| {name} | {meaning} | " in page, name


def test_situations_are_not_counted_on_unequal_decisions() -> None:
    wrong = copy.deepcopy(next(entries("pressure")))
    wrong["steps"][0]["free_blocks"] += 1
    with pytest.raises(ValueError, match="situations need equal decisions"):
        COUNTED.situations_of(wrong)


def test_the_counts_of_situations_include_those_that_never_occur(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(e for e in entries("pressure") if any(s["preempted"] for s in e["steps"]))
    for name in COUNTED.files:
        recording.write(tmp_path / f"{name}.jsonl.gz", [entry])
    assert situations.main(["core", "--folder", str(tmp_path)]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(COUNTED.meanings)
    assert f"{len(COUNTED.files)} core preemption" in lines
    assert any(line.startswith("0 core ") for line in lines)
