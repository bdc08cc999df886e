"""Grammars: what the recordings hold, which wrong treatments they catch, and the peers' masks."""

from __future__ import annotations

import functools

import pytest

from conformance import grammar_mutants, grammar_situations, recording, replay
from conformance.mutants import Mutant, build


@functools.cache
def entries() -> list[recording.Recording]:
    return list(recording.read(grammar_situations.FILE))


def test_every_situation_occurs_in_the_recordings_with_grammars() -> None:
    missing = set(grammar_situations.SITUATIONS)
    for entry in entries():
        if missing:
            missing -= grammar_situations.situations_of(entry)
    assert not missing, f"the recordings no longer hold: {sorted(missing)}"


@pytest.mark.parametrize("mutant", grammar_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_recordings_with_grammars_catch_the_mutant(mutant: Mutant) -> None:
    make_scheduler, make_request = build(mutant)
    caught_by = next(
        (e for e in entries() if replay.replay(e, make_scheduler, make_request)[1]), None
    )
    assert caught_by, f"an engine that {mutant.name} replays the recordings without a difference"
    assert mutant.situation in grammar_situations.situations_of(caught_by)
