"""The reasoning gate of the mini engine beside the real scheduler, manager and parsers."""

from __future__ import annotations

import pytest

from conformance.features.structured_output import reasoning_replay as gate
from conformance.mutants import Mutant
from labkit.tables import markdown_table


@pytest.mark.slow
def test_a_sixth_of_the_runs_has_the_real_masks_drafts_and_reading() -> None:
    assert gate.differing(gate.cases()[::6]) == []


@pytest.mark.slow
def test_every_run_has_the_real_masks_drafts_and_reading() -> None:
    assert gate.differing(gate.cases()) == []


def test_the_page_says_what_the_runs_hold() -> None:
    held = gate.told()
    rows = [[name, str(count)] for name, count in held.items()]
    assert markdown_table(["the runs", "how many"], rows) in gate.README.read_text("utf-8")
    assert len(held) == 13 and all(held.values())


@pytest.mark.slow
@pytest.mark.parametrize("mutant", gate.WRONG, ids=[each.name for each in gate.WRONG])
def test_a_wrong_reading_shows(mutant: Mutant) -> None:
    count = gate.caught(mutant)
    assert count and f"| {mutant.name} | {count} |" in gate.README.read_text("utf-8")
