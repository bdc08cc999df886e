"""Every feature: its recordings catch its mutants, and its page has the tables."""

from __future__ import annotations

import pytest

from conformance import mutants, replay
from conformance.features import FOLDER, holding
from conformance.prefixes import entries

CASES = [
    pytest.param(catalogue, mutant, id=f"{room}-{mutant.name}")
    for room, module in holding("mutants").items()
    for catalogue in module.CATALOGUES.values()
    if isinstance(catalogue, mutants.Catalogue)
    for mutant in catalogue.mutants
]


@pytest.mark.slow
@pytest.mark.parametrize(("catalogue", "mutant"), CASES)
def test_the_recordings_catch_the_mutant(
    catalogue: mutants.Catalogue, mutant: mutants.Mutant
) -> None:
    parts = mutants.build(mutant)
    caught_by = next((e for e in entries(mutant.profile) if replay.replay(e, *parts)[1]), None)
    assert caught_by, f"an engine that {mutant.name} replays {mutant.profile} without a difference"
    assert catalogue.situations_of is None or mutant.situation in catalogue.situations_of(caught_by)


def test_a_mutant_whose_source_has_moved_on_is_an_error() -> None:
    lost = mutants.Mutant("?", (("scheduler", "no such text", ""),), "basic", "preemption")
    with pytest.raises(ValueError, match="holds 0 times 'no such text'"):
        mutants.build(lost)


@pytest.mark.parametrize("room", holding("mutants"))
def test_the_page_of_the_feature_lists_every_mutant(room: str) -> None:
    page = (FOLDER / room / "README.md").read_text(encoding="utf-8")
    for section, catalogue in holding("mutants")[room].CATALOGUES.items():
        text = page.partition(f"<!-- {section} -->")[2].partition(f"<!-- /{section} -->")[0]
        assert text, section
        for mutant in catalogue.mutants if isinstance(catalogue, mutants.Catalogue) else ():
            assert f"\n| {mutant.name} | {mutant.situation}" in text, mutant.name


def test_a_feature_without_mutants_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutants.main(["bogus"])
    assert "feature 'bogus': there are async_scheduling, core" in capsys.readouterr().err
