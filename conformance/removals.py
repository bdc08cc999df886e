"""vLLM with one line of it changed: which recorded workloads and choices come out otherwise.

    python -m conformance.removals              # counts each case again, beside what is kept
    python -m conformance.removals 03-re-04     # one

The second half of a reading lab asks what breaks where a line goes. `removals.yaml` names the
line, as old text and new, and how many workloads of which recordings are decided; the count of
those that come out otherwise is written there by `--write`. Needs the pinned tree.

A case with a `part` is of a choice that vLLM makes outside its scheduler: `PARTS` says what makes
the recorded ones again, and into which groups they fall. It runs in a process of its own, on a tree
of links to the pinned one in which one file is another, and needs torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conformance import parts, recording
from conformance.real_core import RealCore, core_of, why_not
from conformance.real_core.places import tree_of
from conformance.recorders import again
from labkit.modules import load_module

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
    part: str = ""
    """Of `PARTS`; "": the recordings are of the scheduler."""


Choice = tuple[str, Any]
"""The group that a recorded choice falls into, and what was chosen."""
Made = Mapping[str, Any]
"""A case of a part, as its recorder writes it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Choices that vLLM makes outside its scheduler."""

    kept: Callable[[], Iterable[Made]]
    """The recorded cases, or those of them that are made again."""
    made: Callable[[], Iterable[Made]]
    """The same cases, by the vLLM of this process."""
    choices: Callable[[Made], Iterator[Choice]]


def _kept(name: str) -> Callable[[], Iterable[Made]]:
    return lambda: parts.load(name)


_WHEEL = {"fa4": True, "trtllm": True, "batch_invariant": False}


def _selector_kept() -> Iterator[Made]:
    """One case per device: the wheel with everything in it."""
    for case in _kept("attention_selector")():
        if _WHEEL.items() <= case.items():
            yield case


def _selector_made() -> list[Made]:
    from conformance.features.attention import attention_selector

    return list(attention_selector.record(
        [{"capability": name, **_WHEEL} for name in attention_selector.CAPABILITIES]
    ))  # fmt: skip


def _selector(case: Made) -> Iterator[Choice]:
    """The first backend of each configuration."""
    first = [(outcome["valid"] or [None])[0] for outcome in case["outcomes"]]
    yield from ((f"on {case['capability']}", first[number]) for number in case["found"])


def _dispatcher_made() -> Iterable[Made]:
    from conformance.features.cudagraph import cudagraph_dispatcher

    return cudagraph_dispatcher.cases()


def _dispatcher(case: Made) -> Iterator[Choice]:
    """The graph of each batch."""
    yield from ((case["mode"], call) for call in case["calls"])


def _linear_folder() -> Path:
    return next(Path(__file__).parents[1].glob("phase-06-*/labs/lab-05-*"))


def _linear_kept() -> list[Made]:
    found = json.loads((_linear_folder() / "recorded.json").read_text(encoding="utf-8"))
    return [dict(zip(found["keys"], case, strict=True)) for case in found["cases"]]


def _linear_made() -> list[Made]:
    recorder = load_module(_linear_folder() / "record.py")
    return [{**case, "chosen": recorder.real_choice(case)} for case in recorder.cases()]


def _linear(case: Made) -> Iterator[Choice]:
    """The kernel of a packed linear layer."""
    yield f"on {case['capability'] / 10:.1f}", case["chosen"]


def _experts_made() -> Iterable[Made]:
    from conformance.features.moe import expert_backends

    return expert_backends.cases()


def _experts(case: Made) -> Iterator[Choice]:
    """The backend of the experts."""
    yield case["deployment"], case["backend"]


def _masks_made() -> Iterable[Made]:
    from conformance.features.sampling import sampling_masks

    return sampling_masks.cases()


def _masks(case: Made) -> Iterator[Choice]:
    """The tokens that the masks keep."""
    yield f"with min_p={case['min_p']:g}", case["kept"]


PARTS = {
    "attention_selector": Part(_selector_kept, _selector_made, _selector),
    "cudagraph_dispatcher": Part(_kept("cudagraph_dispatcher"), _dispatcher_made, _dispatcher),
    "linear_kernels": Part(_linear_kept, _linear_made, _linear),
    "expert_backends": Part(_kept("expert_backends"), _experts_made, _experts),
    "sampling_masks": Part(_kept("sampling_masks"), _masks_made, _masks),
}


def cases(path: Path = FILE) -> list[Case]:
    """Those that are kept."""
    items = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Case(**item) for item in items]


def changed_text(case: Case) -> str:
    """The changed file.

    Raises:
        ValueError: the old text does not occur exactly once.
    """
    text = (tree_of(recording.UPSTREAM["version"]) / case.path).read_text(encoding="utf-8")
    if (count := text.count(case.old)) != 1:
        raise ValueError(f"{case.question}: {case.old!r} occurs {count} times in {case.path}")
    return text.replace(case.old, case.new)


def changed(case: Case) -> RealCore:
    """The pinned core with the change in it. Raises ValueError as `changed_text`."""
    tree, text = tree_of(recording.UPSTREAM["version"]), changed_text(case)
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "core.zip")
        with zipfile.ZipFile(packed, "w") as archive:
            for name in ["vllm/_version.py", *core_of().namespace.files]:
                if name == case.path:
                    archive.writestr(name, text)
                else:
                    archive.write(tree / name, name)
        return RealCore(packed)


def count(case: Case) -> dict[str, int]:
    """By recording: how many of its workloads the changed core decides otherwise.

    A workload that the changed core cannot decide to its end, because it raises or plans nothing
    for ever, counts as decided otherwise.
    """
    if case.part:
        return _count_of_part(case)
    core, found = changed(case), dict.fromkeys(case.workloads, 0)
    for profile, most in case.workloads.items():
        path = RECORDINGS / f"{profile}.jsonl.gz"
        for number, kept in enumerate(recording.read(path)):
            if number == most:
                break
            found[profile] += not _same(kept, core)
    return found


def why_no_part() -> str:
    """Why the choices of `PARTS` cannot be made here; "" where they can."""
    return why_not() or ("" if importlib.util.find_spec("torch") else "needs torch")


def groups_of(part: str) -> Counter[str]:
    """How many choices of a part are recorded, by group."""
    return Counter(group for group, _ in _choices(part, PARTS[part].kept()))


def _choices(part: str, made: Iterable[Made]) -> list[Choice]:
    return [choice for case in made for choice in PARTS[part].choices(case)]


def _count_of_part(case: Case) -> dict[str, int]:
    """As `count`, of the recorded choices of a part.

    Raises:
        ValueError: a group holds another number of choices than the case says.
        RuntimeError: the part could not be made again; with what it said.
    """
    groups = groups_of(case.part)
    for group, most in case.workloads.items():
        if groups[group] != most:
            raise ValueError(f"{case.question}: {groups[group]} choices {group}, not {most}")
    tree = tree_of(recording.UPSTREAM["version"]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(tree / "vllm", Path(folder) / "vllm", copy_function=os.symlink)
        file = Path(folder) / case.path
        file.unlink()
        file.write_text(changed_text(case), encoding="utf-8")
        made = _choices(case.part, _made(case.part, Path(folder)))
    recorded = _choices(case.part, PARTS[case.part].kept())
    differ = Counter(
        group for (group, kept), (_, now) in zip(recorded, made, strict=True) if kept != now
    )
    return {group: differ[group] for group in case.workloads}


def _made(part: str, tree: Path) -> list[Made]:
    """What a tree chooses, in a process of its own."""
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "conformance.removals", "--made", part],
        cwd=here, env=os.environ | {"PYTHONPATH": f"{tree}:{here}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{part}: {done.stderr[-2000:]}")
    found: list[Made] = json.loads(done.stdout.splitlines()[-1])
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
    parser.add_argument("--made", choices=PARTS, help="print what this process's vLLM chooses")
    asked = parser.parse_args(argv)
    if asked.made:
        print(json.dumps(list(PARTS[asked.made].made())))
        return 0
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
        if case.part and not asked.question and (lacking := why_no_part()):
            print(f"{case.question}  {lacking}")
        elif not asked.question or case.question in asked.question:
            found = count(case)
            told = ", ".join(f"{found[p]} of {case.workloads[p]} {p}" for p in found)
            print(f"{case.question}  {told}" + ("" if found == case.differ else "  NOT AS KEPT"))
            bad += found != case.differ
        item = {name: getattr(case, name) for name in Case.__dataclass_fields__}
        items.append({n: value for n, value in item.items() if value != ""} | {"differ": found})
    if asked.write:
        head = "# What vLLM decides otherwise with one line changed: see removals.py.\n"
        text = yaml.safe_dump(items, sort_keys=False, allow_unicode=True, width=99)
        FILE.write_text(head + text, encoding="utf-8")
        return 0
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
