"""Drafts: what the recordings hold, and which wrong treatments of drafts they catch."""

from __future__ import annotations

import pytest

from conformance import recording, replay, spec_mutants, spec_situations
from conformance.mutants import RECORDINGS, Mutant, build


def test_every_situation_occurs_in_the_recordings_with_drafts() -> None:
    missing = set(spec_situations.SITUATIONS)
    for name in spec_situations.FILES:
        for entry in recording.read(RECORDINGS / f"{name}.jsonl.gz") if missing else ():
            if missing:
                missing -= spec_situations.situations_of(entry)
    assert not missing, f"the recordings no longer hold: {sorted(missing)}"


@pytest.mark.parametrize("mutant", spec_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_recordings_with_drafts_catch_the_mutant(mutant: Mutant) -> None:
    make_scheduler, make_request = build(mutant)
    path = RECORDINGS / f"{mutant.profile}.jsonl.gz"
    difference = replay.first_difference(path, make_scheduler, make_request)
    assert difference, f"a scheduler that {mutant.name} replays {path.name} without a difference"
    caught_by = next(e for e in recording.read(path) if e["seed"] == difference.seed)
    assert mutant.situation in spec_situations.situations_of(caught_by)
