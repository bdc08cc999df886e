"""Write recordings: what the real v0.22.1 decides, part by part.

    python -m conformance.record --list
    python -m conformance.record free_queue check_stop          # into conformance/recordings
    python -m conformance.record scheduler                      # a group: nine files
    python -m conformance.record basic --seeds 4711 --core --out /some/folder

A part is one file of JSON lines, gzipped, made by one function; a feature lists its own in
`features/<feature>/recorded.py`. Recording needs the pinned tree on `PYTHONPATH`, or the real
engine; `--list` says which. The scheduler's parts need neither with `--core`, but the tree in
`upstream/`. Equal decisions give equal bytes.
"""

from __future__ import annotations

import argparse
import collections
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features import FOLDER as FEATURES
from conformance.features import RECORDINGS, Part, holding
from conformance.real_core import ArchiveError, LoadError, core_of
from conformance.recorders.source import Real
from conformance.releases import RELEASES
from labkit.tables import markdown_table, write_section

FOLDER = RECORDINGS
README = Path(__file__).with_name("README.md")
COMMANDS = {
    "upstream": "python -m conformance.record",
    "engine": "course engine run -m conformance.record",
    "gpu": "course engine run -m conformance.record",
}
"""How a part is recorded: with the pinned tree, with the real engine, with it on a GPU."""


def _release(version: str) -> Part:
    return Part(
        f"releases/{version}.jsonl.gz", "releases.record:kept",
        f"`Scheduler` of {version}, seeds 0 to 3,599 of `workloads.py`",
        f"`replay --release {version}`", "workloads", "releases", options={"version": version},
        takes_seeds=True,
    )  # fmt: skip


PARTS: dict[str, Part] = {
    **{name: part for room in holding("recorded").values() for name, part in room.PARTS.items()},
    **{f"release-{version}": _release(version) for version in RELEASES},
    "release-hazard": Part(
        "releases/hazard-0.33.0.jsonl.gz", "releases.record:hazard",
        "the stale read under the priority policy, at 0.33.0", "`test_releases.py`", "workloads",
        "releases", options={"version": "0.33.0"},
    ),
    "release-stops": Part(
        "releases/check_stop-0.33.0.jsonl.gz", "releases.record:stops",
        "`check_stop` of 0.33.0, the cases of `check_stop`", "`test_releases.py`, lab 19-05",
        group="releases", options={"version": "0.33.0"},
    ),
}  # fmt: skip
"""Every part, by name: those of the features, and of releases."""


def chosen(names: Sequence[str]) -> list[str]:
    """Part names, groups resolved, each once.

    Raises:
        ValueError: a name is neither a part nor a group.
    """
    groups = {part.group for part in PARTS.values()}
    found: list[str] = []
    for name in names:
        if name not in PARTS and name not in groups:
            known = ", ".join([*sorted(groups), *PARTS])
            raise ValueError(f"part {name!r}: there are {known}")
        found += [name] if name in PARTS else [n for n, p in PARTS.items() if p.group == name]
    return list(dict.fromkeys(found))


def lines_of(
    name: str, seeds: Sequence[int] | None = None, real: Real | None = None
) -> Iterator[dict[str, Any]]:
    """What the real part says now, line by line.

    Raises:
        ValueError: `seeds` or `real` are given for a part that does not take them.
    """
    part = PARTS[name]
    module_name, function = part.function.split(":")
    module = importlib.import_module(f"conformance.{module_name}")
    options = dict(part.options)
    if seeds is not None:
        if not part.takes_seeds:
            raise ValueError(f"seeds={list(seeds)}: {name} is not made from seeds")
        options["seeds"] = seeds
    if real is not None:
        if not part.takes_seeds or part.group == "releases":
            raise ValueError(f"{name}: the core alone does not make it; leave out --core")
        options["real"] = real
    if hasattr(module, "ABOUT"):
        yield {"upstream": recording.UPSTREAM, "part": name, "about": module.ABOUT}
    yield from getattr(module, function)(**options)


def count_of(name: str, folder: Path = FOLDER) -> int | None:
    """How many cases, workloads or runs the kept file holds; None where there is none."""
    path = folder / PARTS[name].file
    if not path.is_file():
        return None
    if PARTS[name].unit == "requests":  # beside a machine, and what a server says of itself
        return sum("name" in line for line in recording.lines(path))
    header = "about" in recording.first(path)  # a file of cases begins with what a case holds
    return recording.count(path) - header


def command_of(name: str) -> str:
    """The command that records a part."""
    return f"{COMMANDS[PARTS[name].needs]} {name}"


def table(parts: Mapping[str, Part]) -> str:
    """What is recorded of some parts, as Markdown, from the list and the files."""
    rows = []
    for name, part in parts.items():
        count = count_of(name)
        if count is not None:
            where = " (a GPU)" if part.needs == "gpu" else ""
            file = f"`{part.file.removesuffix('.jsonl.gz')}`"
            command = f"`{command_of(name)}`{where}"
            rows.append([file, part.what, f"{count:,} {part.unit}", part.by, command])
    return markdown_table(["part, file", "what", "how much", "replayed by", "command"], rows)


def overview() -> str:
    """The features, and how much each has recorded and is proved by, as Markdown."""
    rows = []
    for room, module in holding("recorded").items():
        sums: collections.Counter[str] = collections.Counter()
        for name, part in module.PARTS.items():
            sums[part.unit] += count_of(name) or 0
        said = ", ".join(f"{count:,} {unit}" for unit, count in sums.items())
        situations = holding("situations").get(room)
        mutants = holding("mutants").get(room)
        rows.append([
            f"[{room}](features/{room}/README.md)", said,
            str(len(situations.COUNTED.meanings)) if situations else "-",
            str(len(mutants.MUTANTS)) if mutants else "-",
        ])  # fmt: skip
    return markdown_table(["feature", "recorded", "situations", "mutants"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.record", description="Record parts of the real engine."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="names or groups; see --list")
    parser.add_argument("--list", action="store_true", help="every part, its count and command")
    parser.add_argument("--write", action="store_true", help="with --list: the tables of the pages")
    parser.add_argument("--seeds", type=int, nargs="+", help="of scheduler parts: these seeds only")
    parser.add_argument("--core", action="store_true", help="upstream/'s own core, without torch")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the files")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name in PARTS:
            count = count_of(name)
            held = "-" if count is None else f"{count:,} {PARTS[name].unit}"
            print(f"{name:<21} {held:>16}  {command_of(name)}")
        if arguments.write:
            write_section("features", overview(), README)
            for room, module in holding("recorded").items():
                write_section("recorded", table(module.PARTS), FEATURES / room / "README.md")
        return 0
    if not arguments.parts:
        parser.error("name a part or a group; --list says which there are")
    try:
        real = core_of() if arguments.core else None
        for name in chosen(arguments.parts):
            path = arguments.out / PARTS[name].file
            entries = list(lines_of(name, arguments.seeds, real))
            path.parent.mkdir(parents=True, exist_ok=True)
            recording.write(path, entries)
            print(f"{path}: {count_of(name, arguments.out):,} {PARTS[name].unit}")
    except (ValueError, ArchiveError, LoadError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
