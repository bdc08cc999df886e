"""How often each situation that a feature names occurs in its recordings.

    python -m conformance.situations                      # every feature
    python -m conformance.situations lora --write         # one; its table goes into its README

Prints one count per situation (in how many workloads it occurs) and exits 1 when one never does, so
that recordings cannot silently stop testing something.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from conformance import recording
from conformance.features import FOLDER, RECORDINGS, Counted, holding
from labkit.tables import markdown_table, write_section


def count(counted: Counted, folder: Path = RECORDINGS) -> dict[str, Counter[str]]:
    """Of each of its files, in how many workloads each situation occurs.

    Raises:
        RecordingError: a file is not a recording.
    """
    found = {}
    for name in counted.files:
        entries = recording.read(folder / f"{name}.jsonl.gz")
        found[name] = Counter(each for entry in entries for each in counted.situations_of(entry))
    return found


def table(counted: Counted, found: dict[str, Counter[str]]) -> str:
    """As Markdown: a column for each of two files, one for all of several."""
    if len(found) != 2:
        found = {"workloads": sum(found.values(), Counter())}
    header = [name if len(found) == 1 else f"`{name}`" for name in found]
    rows = [
        [name, meaning, *(str(each[name]) for each in found.values())]
        for name, meaning in counted.meanings.items()
    ]
    return markdown_table(["situation", "meaning", *header], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    features = {room: module.COUNTED for room, module in holding("situations").items()}
    parser = argparse.ArgumentParser(
        prog="python -m conformance.situations",
        description="Count the situations in recordings; exit 1 when one never occurs.",
    )
    parser.add_argument("features", nargs="*", metavar="FEATURE", help=", ".join(features))
    parser.add_argument("--folder", type=Path, default=RECORDINGS, help="of the recordings")
    parser.add_argument("--write", action="store_true", help="update the features' README.md")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.features if name not in features]:
        parser.error(f"feature {unknown[0]!r}: there are {', '.join(features)}")
    all_occur = True
    for room in arguments.features or features:
        counted = features[room]
        try:
            found = count(counted, arguments.folder)
        except recording.RecordingError as error:
            print(error, file=sys.stderr)
            return 2
        total = sum(found.values(), Counter[str]())
        for name in counted.meanings:
            print(f"{total[name]:6}  {room:18} {name}")
        all_occur = all_occur and all(total[name] for name in counted.meanings)
        if arguments.write:
            write_section(counted.section, table(counted, found), FOLDER / room / "README.md")
    return 0 if all_occur else 1


if __name__ == "__main__":
    raise SystemExit(main())
