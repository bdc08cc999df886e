"""The recorder's list: every kept file has a line, and the page's table is what the list gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import record, recording
from conformance.features import FOLDER, holding
from conformance.real_core import why_not

NOT_KEPT = ("default-float32",)


def test_every_kept_file_is_a_part_and_all_parts_but_these_are_kept():
    kept = {str(path.relative_to(record.FOLDER)) for path in record.FOLDER.rglob("*.*")}
    listed = {part.file: name for name, part in record.PARTS.items()}
    assert kept == set(listed) - {record.PARTS[name].file for name in NOT_KEPT}


@pytest.mark.slow
def test_the_tables_on_the_pages_are_what_the_lists_and_the_files_give():
    assert record.overview() in record.README.read_text(encoding="utf-8")
    for room, module in holding("recorded").items():
        page = (FOLDER / room / "README.md").read_text(encoding="utf-8")
        assert record.table(module.PARTS) in page, "python -m conformance.record --list --write"


def test_a_file_of_cases_begins_with_what_a_case_holds():
    for name, part in record.PARTS.items():
        if part.group == "parts":
            header = recording.first(record.FOLDER / part.file)
            assert (header["upstream"], header["part"]) == (recording.UPSTREAM, name)
            assert header["about"], name


def test_groups_stand_for_their_parts_and_nothing_is_recorded_twice():
    names = record.chosen(["basic", "scheduler"])
    assert names[:2] == ["basic", "pressure"] and len(names) == len(set(names)) == 29
    with pytest.raises(
        ValueError, match="part 'bogus': there are engine, installed, parts, releases, scheduler"
    ):
        record.chosen(["bogus"])


def test_what_cannot_be_recorded_is_refused_in_words(capsys, tmp_path: Path):
    for arguments, words in (
        ([], "name a part or a group"),
        (["bogus"], "part 'bogus': there are"),
        (["free_queue", "--seeds", "3"], "seeds=[3]: free_queue is not made from seeds"),
    ):
        with pytest.raises(SystemExit):
            record.main([*arguments, "--out", str(tmp_path)])
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_part_is_recorded_again_from_the_core_alone(tmp_path: Path):
    assert record.main(["lora", "--seeds", "60000", "--core", "--out", str(tmp_path)]) == 0
    (again,) = recording.read(tmp_path / "lora.jsonl.gz")
    assert again == next(recording.read(record.FOLDER / "lora.jsonl.gz"))
    with pytest.raises(SystemExit):
        record.main(["free_queue", "--core", "--out", str(tmp_path)])


@pytest.mark.upstream
def test_recorded_again_a_file_has_the_same_bytes(tmp_path: Path):
    parts = ["free_queue", "block_hashing", "hazard", "tp_shards", "pp_layers"]
    assert record.main([*parts, "--out", str(tmp_path)]) == 0
    for name in parts:
        file = record.PARTS[name].file
        assert (tmp_path / file).read_bytes() == (record.FOLDER / file).read_bytes(), name
