"""Landing pages: made of what there is, and promising nothing else."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from course.conftest import REPOSITORY
from course.learning.labs import find_labs
from course.site import addresses, answers, book, book_extras, places

PHASES = sorted(path.parent.parent for path in REPOSITORY.glob("phase-*/labs/README.md"))


@cache
def order() -> list[Path]:
    return book.contents(REPOSITORY).order()


@cache
def landing(phase: Path) -> str:
    return places.landing(REPOSITORY, phase, order())


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name[:8])
def test_a_landing_page_says_what_a_phase_promises_takes_and_makes(phase):
    text = " ".join(landing(phase).split())
    assert "At the end" in text and "this page" not in text.casefold()
    assert re.search(r"About [\d.]+ hours · [\d.]+ (minutes|hours) to read", text)
    assert re.search(r"!\[[^\]]{20,}\]\([^)]+\.svg\)", text)
    assert re.search(r"[1-9]\d* functions and classes of your own, checked by [1-9]\d* tests", text)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name[:8])
def test_a_landing_page_leads_to_every_page_and_lab_there_is_and_to_no_other(phase):
    links = re.findall(r'href="([^"]+)"|\]\(([^)\s]+\.md)\)', landing(phase))
    targets = {
        (phase / (a or b).replace("index.html", "README.md")).with_suffix(".md") for a, b in links
    }
    assert all(target.is_file() for target in targets), targets
    labs = {
        lab.folder / "README.md"
        for lab in find_labs(REPOSITORY)
        if lab.folder.is_relative_to(phase)
    }
    pages = {phase / name for name in places.TELLS if (phase / name).is_file()}
    assert labs | pages <= targets


@pytest.mark.slow
def test_every_phase_of_the_book_begins_with_its_landing_page_and_the_former_leads_there():
    firsts = [
        next(page for page in order() if addresses.phase_of(REPOSITORY, page) == phase)
        for phase in PHASES
    ]
    assert firsts == [places.page_of(phase) for phase in PHASES]
    for phase, after in pairwise(PHASES):
        last = [page for page in order() if addresses.phase_of(REPOSITORY, page) == phase][-1]
        up = "../" * (len(last.relative_to(REPOSITORY).parts) - 1)  # labs may be all there is
        made = book_extras.frame(REPOSITORY, last, "# x\n", order())
        assert (
            f'<a class="next-page" href="{up}{after.name}/index.html"><small>Next phase</small>'
            in made
        )


def test_the_labs_stand_in_the_order_of_their_phase():
    phase = REPOSITORY / "phase-02-paged-attention"
    ids = re.findall(r">(02-\d\d) ", landing(phase))
    assert ids == ["02-02", "02-01", "02-05", "02-06", "02-03", "02-04"]


def test_times_are_those_of_the_pages_and_labs():
    phase = REPOSITORY / "phase-19-capstone-maintainer-and-startup"
    labs = [lab for lab in find_labs(REPOSITORY) if lab.folder.is_relative_to(phase)]
    minutes = sum(lab.manifest.minutes for lab in labs)
    assert f"{places.hours(minutes)} for {len(labs)} labs" in landing(phase)
    times = (45, 119, 120, 134, 136, 599, 600, 800)
    assert [places.hours(minutes) for minutes in times] == [
        "45 minutes", "119 minutes", "2 hours", "2 hours",
        "2.5 hours", "10 hours", "10 hours", "13 hours",
    ]  # fmt: skip


def test_the_parts_named_are_those_that_the_labs_supply():
    text = landing(REPOSITORY / "phase-02-paged-attention")
    assert "3 labs supply a part of the engine" in text
    assert "`BlockPool`, the engine's `block_pool`, from lab [02-01](labs/lab-01-block-" in text
    assert ': `course run --mine "Once upon a time"`' in text
    ranks = landing(REPOSITORY / "phase-10-distributed-inference")
    assert "`shard_qkv`, the engine's `shards`, from lab [10-01]" in ranks
    assert "course run --mine --tensor-parallel-size 2" in ranks
    assert "of the engine" not in landing(REPOSITORY / "phase-17-hardware-backends-and-plugins")


def test_what_can_be_checked_on_a_page_is_counted_by_its_boxes():
    phase = REPOSITORY / "phase-02-paged-attention"
    count = len(answers.on_page(phase / "EXERCISES.md"))
    assert count and f"questions to answer in writing; {count} answers can be checked" in landing(
        phase
    )
    assert "done; " not in landing(phase), "the guide has no boxes"


def test_the_home_page_leads_to_the_landing_pages():
    home = places.to_landings((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    table = home.partition("<!-- curriculum -->")[2].partition("<!-- /curriculum -->")[0]
    assert table.count("/README.md)") == len(PHASES) and "00-guide.md" not in table
    assert "(phase-00-foundations/00-guide.md)" in home, "other links stay"
