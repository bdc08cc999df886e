"""Wrong engines, each one edit away from the right one, that what is recorded must catch.

    python -m conformance.mutants                    # every feature
    python -m conformance.mutants lora --write       # one; its table goes into its README

A mutant is a replacement in the source of one or more modules of `mini_vllm`; it stands for a
misreading of the real engine. Each names the recording and the situation that catch it. A feature's
`mutants.CATALOGUES` says how its own are counted, by the section of its README.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mini_vllm
from conformance import recording, replay
from conformance.features import FOLDER, RECORDINGS, Find, holding
from labkit.tables import markdown_table, write_section
from mini_vllm.request import Request

SOURCES = Path(mini_vllm.__path__[0])


@dataclass(frozen=True, slots=True)
class Mutant:
    """One misreading: its edits, and where it shows."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    """(module, old text, new text); the old text occurs exactly once."""
    profile: str
    """The recording file that catches it."""
    situation: str
    """The situation every workload that catches it there holds; "" for any."""


def diffs(text: str, profile: str = "") -> tuple[Mutant, ...]:
    """The mutants of a text: blocks apart by an empty line, each a name and its edits as diffs.

    `@ module | situation | file` stands before the lines of an edit, which begin with a space, "-"
    or "+". Situation and file stand in a mutant's first edit; the file is `profile` where none is
    named, the situation any.
    """
    found = []
    for block in text.strip("\n").split("\n\n"):
        name, *lines = block.split("\n")
        edits: list[tuple[str, list[str], list[str]]] = []
        told: list[str] = []
        for line in lines:
            sign, rest = line[0], line[1:]
            if sign == "@":
                module, *where = rest.strip().split(" | ")
                told += where
                edits.append((module, [], []))
            if sign in " -":
                edits[-1][1].append(rest)
            if sign in " +":
                edits[-1][2].append(rest)
        made = tuple((module, "\n".join(old), "\n".join(new)) for module, old, new in edits)
        situation, file = [*told, "", ""][:2]
        found.append(Mutant(name, made, file or profile, situation))
    return tuple(found)


def sources(mutant: Mutant) -> dict[str, str]:
    """The changed source of each module that the mutant edits.

    Raises:
        ValueError: an edit's old text is not in the source exactly once: the source has moved on,
            and the mutant must follow it.
    """
    changed: dict[str, str] = {}
    for module, old, new in mutant.edits:
        text = changed.get(module) or _source(module)
        if text.count(old) != 1:
            raise ValueError(
                f"mutant {mutant.name!r}: {module}.py holds {text.count(old)} times {old!r}"
            )
        changed[module] = text.replace(old, new)
    return changed


def _source(module: str) -> str:
    return (SOURCES / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


_CHAINS = (("queues", "scheduler", "async_scheduler"), ("kv.groups", "kv.coordinator"))
"""Each module imports from the one before it."""


def build(mutant: Mutant) -> tuple[replay.Build, replay.MakeRequest]:
    """The mutated engine, for `replay.replay`. Raises ValueError as `sources` does."""
    find = found_in(sources(mutant))

    def make_scheduler(config: Mapping[str, Any]) -> Any:
        return replay.mini_scheduler(
            config,
            find("scheduler", "Scheduler"),
            find("kv_cache", "KVCacheManager"),
            find("block_pool", "BlockPool"),
            find=find,
        )

    def make_request(add: Mapping[str, Any], eos_token_id: int) -> Request:
        return replay.mini_request(add, eos_token_id, find("request", "Request"), find)

    return make_scheduler, make_request


def found_in(changed: dict[str, str]) -> Find:
    """What finds a class in the changed modules, or in the engine's own."""
    for chain in _CHAINS:
        if changed.keys() & set(chain):
            for name in chain:
                changed.setdefault(name, _source(name))
    order = {name: index for chain in _CHAINS for index, name in enumerate(chain, 1)}
    modules: dict[str, ModuleType] = {}
    for name in sorted(changed, key=lambda name: order.get(name, 0)):
        text = changed[name]
        for base in next((chain for chain in _CHAINS if name in chain), ()):
            text = text.replace(f"from mini_vllm.{base} import", f"from {_name(base)} import")
        modules[name] = _load(name, text)

    def find(module: str, name: str) -> Any:
        owner: Any = modules.get(module) or importlib.import_module(f"mini_vllm.{module}")
        return getattr(owner, name)

    return find


def edited(module: ModuleType, old: str, new: str) -> ModuleType:
    """A module of `mini_vllm` with one edit, under a name of its own.

    Raises:
        AssertionError: `old` does not stand there exactly once.
    """
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{module.__name__} has changed: mend the mutant"
    return _load(module.__name__.removeprefix("mini_vllm."), source.replace(old, new))


def _name(module: str) -> str:
    return f"_mutant_{module.replace('.', '_')}"


def _load(name: str, source: str) -> ModuleType:
    """A module from source text, registered under a name of its own (dataclasses look it up)."""
    module = ModuleType(_name(name))
    sys.modules[module.__name__] = module
    exec(compile(source, f"<mutant {name}.py>", "exec"), module.__dict__)
    return module


@functools.cache
def _entries(profile: str) -> list[recording.Recording]:
    return list(recording.read(RECORDINGS / f"{profile}.jsonl.gz"))


def catching(mutant: Mutant) -> list[tuple[recording.Recording, replay.Difference]]:
    """The workloads of its file that differ, each with where it first does."""
    make_scheduler, make_request = build(mutant)
    found = ((entry, replay.replay(entry, make_scheduler, make_request)[1])
             for entry in _entries(mutant.profile))  # fmt: skip
    return [(entry, difference) for entry, difference in found if difference]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Mutants that replays must catch; called, it counts them."""

    mutants: Sequence[Mutant]
    situations_of: Callable[[recording.Recording], set[str]] | None = None
    """The situations of a workload; without it the table says where most first differ."""

    def __call__(self) -> tuple[str, bool]:
        """The table, and whether every mutant is caught, only where it may show."""
        rows, all_held = [], True
        for mutant in self.mutants:
            caught = catching(mutant)
            print(f"{len(caught):6}  {mutant.profile:14} {mutant.name}", flush=True)
            all_held = all_held and bool(caught)
            if self.situations_of is None:
                fields = collections.Counter(difference.field for _, difference in caught)
                where = f"`{fields.most_common(1)[0][0]}`" if fields else "none"
            else:
                where = mutant.situation
                for entry, _ in caught:
                    if where not in self.situations_of(entry):
                        all_held = False
                        print(f"seed {entry['seed']}: {mutant.name}, without {where}")
            rows.append([mutant.name, where, f"`{mutant.profile}`", str(len(caught))])
        where = "differs only where" if self.situations_of else "most differ first in"
        header = ["an engine that", where, "file", "workloads of it that differ"]
        return markdown_table(header, rows), all_held


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts; the exit status is 1 if one is missed, or caught where it may not be."""
    known = {room: module.CATALOGUES for room, module in holding("mutants").items()}
    parser = argparse.ArgumentParser(
        prog="python -m conformance.mutants", description="Which recordings catch which mutant."
    )
    parser.add_argument("features", nargs="*", metavar="FEATURE", help=", ".join(known))
    parser.add_argument("--write", action="store_true", help="update the features' README.md")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.features if name not in known]:
        parser.error(f"feature {unknown[0]!r}: there are {', '.join(known)}")
    all_held = True
    for room in arguments.features or known:
        for section, counted in known[room].items():
            text, held = counted()
            all_held = all_held and held
            if arguments.write:
                write_section(section, text, FOLDER / room / "README.md")
    return 0 if all_held else 1


if __name__ == "__main__":
    raise SystemExit(main())
