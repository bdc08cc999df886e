"""vLLM's scheduler with one line of it changed: which recorded workloads it decides otherwise.

    python -m conformance.removals              # counts each case again, beside what is kept
    python -m conformance.removals 03-re-04     # one

The second half of a reading lab asks what breaks where a line goes. `removals.yaml` names the
line, as old text and new, and how many workloads of which recordings are decided; the count of
those that come out otherwise is written there by `--write`. Needs the pinned tree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from conformance import recording
from conformance.real_core import RealCore, core_of, why_not
from conformance.real_core.places import tree_of
from conformance.recorders import again

FILE = Path(__file__).with_name("removals.yaml")
RECORDINGS = Path(__file__).parent / "recordings"


@dataclass(frozen=True, slots=True)
class Case:
    """One change of the pinned core, by the question that asks for it."""

    question: str
    path: str
    """Below the root of the pinned tree."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    workloads: dict[str, int]
    """By recording: how many of its workloads are decided, the first ones of the file."""
    differ: dict[str, int]
    """By recording: how many of these come out otherwise."""


def cases(path: Path = FILE) -> list[Case]:
    """Those that are kept."""
    items = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Case(**item) for item in items]


def changed(case: Case) -> RealCore:
    """The pinned core with the change in it.

    Raises:
        ValueError: the old text does not occur exactly once.
    """
    tree = tree_of(recording.UPSTREAM["version"])
    text = (tree / case.path).read_text(encoding="utf-8")
    if (count := text.count(case.old)) != 1:
        raise ValueError(f"{case.question}: {case.old!r} occurs {count} times in {case.path}")
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "core.zip")
        with zipfile.ZipFile(packed, "w") as archive:
            for name in ["vllm/_version.py", *core_of().namespace.files]:
                if name == case.path:
                    archive.writestr(name, text.replace(case.old, case.new))
                else:
                    archive.write(tree / name, name)
        return RealCore(packed)


def count(case: Case) -> dict[str, int]:
    """By recording: how many of its workloads the changed core decides otherwise.

    A workload that the changed core cannot decide to its end, because it raises or plans nothing
    for ever, counts as decided otherwise.
    """
    core, found = changed(case), dict.fromkeys(case.workloads, 0)
    for profile, most in case.workloads.items():
        path = RECORDINGS / f"{profile}.jsonl.gz"
        for number, kept in enumerate(recording.read(path)):
            if number == most:
                break
            found[profile] += not _same(kept, core)
    return found


def _same(kept: recording.Recording, core: RealCore) -> bool:
    try:
        return again.record(kept, core) == kept
    except Exception:  # what a changed core raises is its own
        return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("question", nargs="*", help="of a case, as 03-re-04; default: every one")
    parser.add_argument("--write", action="store_true", help="keep the counts")
    asked = parser.parse_args(argv)
    if problem := why_not():
        parser.error(problem)
    kept = cases()
    known = [case.question for case in kept]
    for name in asked.question:
        if name not in known:
            parser.error(f"there is no case {name}: one of {', '.join(known)}")
    bad, items = 0, []
    for case in kept:
        found = case.differ
        if not asked.question or case.question in asked.question:
            found = count(case)
            told = ", ".join(f"{found[p]} of {case.workloads[p]} {p}" for p in found)
            print(f"{case.question}  {told}" + ("" if found == case.differ else "  NOT AS KEPT"))
            bad += found != case.differ
        items.append(
            {name: getattr(case, name) for name in Case.__dataclass_fields__} | {"differ": found}
        )
    if asked.write:
        head = "# What a changed line of vLLM's scheduler decides otherwise: see removals.py.\n"
        text = yaml.safe_dump(items, sort_keys=False, allow_unicode=True, width=99)
        FILE.write_text(head + text, encoding="utf-8")
        return 0
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
