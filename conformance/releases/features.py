"""Which release is served with which feature: so many workloads of each, decided by its own core.

    python -m conformance.releases.features [VERSION ...] [--kinds EAGLE] [--write]

Replays fresh workloads of every release whose archive is here on our parts of it, every field of
every step. `--write` puts the table into SINCE_THE_PIN.md. A feature is served where none differs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from conformance import recording
from conformance.features.core.recorder import Stalled
from conformance.real_core import ArchiveError, LoadError, RealCore
from conformance.recorders import combined
from conformance.releases import builders
from conformance.releases.__main__ import ROOT
from conformance.releases.record import core_for
from conformance.replay import replay
from labkit.tables import markdown_table, write_section
from mini_vllm.releases import PARTS

PAGE = ROOT / "SINCE_THE_PIN.md"
SEEDS = range(150)
"""Of every kind, each once with the synchronous scheduler and once with the asynchronous one."""
ROOMS = {"drafts": "spec_decode", "adapters": "lora", "grammars": "structured_output"}
"""Features of a workload, and the rooms of the engine that serve them."""
TOGETHER = (
    ("drafts", "adapters"), ("drafts", "grammars"), ("adapters", "grammars"),
    ("drafts", "adapters", "grammars"),
)  # fmt: skip


def alone(*features: str) -> Callable[[int], tuple[str, ...]]:
    """The same features for every seed."""
    return lambda seed: features


def drawn(seed: int) -> tuple[str, ...]:
    """Two features or three."""
    return random.Random(seed * 19 + 11).choice(TOGETHER)


EAGLE = "EAGLE"
"""Drafts of a head that reads the target's states, every second time with grammars. The rule is
that of `method="mtp"`, which the engine has; in the other columns a draft model drafts in its
place."""
KINDS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "plain": alone(), **{name: alone(name) for name in ROOMS}, "several": drawn,
    EAGLE: lambda seed: ("drafts", "grammars")[: 1 + seed % 2],
}  # fmt: skip
"""The columns of the table: which features the workload of a seed has."""
ELSEWHERE = {
    "multimodal": "[pictures](conformance/features/multimodal/README.md)",
    "kv_transfer": "[connectors](conformance/features/kv_transfer/README.md)",
    "distributed": "[ranks](conformance/features/distributed/README.md)",
}
"""Rooms whose decisions are compared with releases on pages of their own."""
HEADER = ["release", *KINDS, "besides"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of workload on the parts of one release."""

    num_workloads: int
    num_differing: int
    is_served: bool

    def __str__(self) -> str:
        how = "served" if self.is_served else "refused"
        return f"{how}: {self.num_differing} of {self.num_workloads}"


def is_served(version: str, features: Iterable[str]) -> bool:
    """Whether `LLM(release=version)` takes these features together."""
    return all(ROOMS[name] in PARTS[version].rooms for name in features)


def workloads_of(
    kind: str, seeds: Sequence[int], core: RealCore
) -> Iterator[tuple[tuple[str, ...], recording.Recording]]:
    """Features and recording of each seed; what the engine or the release refuses is left out."""
    for seed in seeds:
        features = KINDS[kind](seed)
        for ahead in ((), ("async",)):
            if ahead and {"drafts", "adapters"} <= set(features):
                continue  # the release may fail an assertion, and the engine refuses the three
            workload = combined.generate(seed, {*features, *ahead})
            drafter = workload["config"].get("speculative", {})
            if kind == EAGLE or drafter.get("method") == "eagle":
                drafter["method"] = "eagle" if kind == EAGLE else "draft_model"
            try:
                yield features, combined.run(workload, core)
            except (combined.RefusedError, Stalled):
                continue


def counted(version: str, kind: str, seeds: Sequence[int], core: RealCore) -> Cell:
    """How many workloads of a kind a release decides another way than our parts of it.

    Of several features at once those workloads count whose features the release is served with;
    where there are none, all.
    """
    entries = list(workloads_of(kind, seeds, core))
    served = [(names, entry) for names, entry in entries if is_served(version, names)]
    ours = builders(PARTS[version])
    kept = served or entries
    differing = sum(replay(entry, *ours)[1] is not None for _, entry in kept)
    return Cell(len(kept), differing, bool(served))


def row(version: str, seeds: Sequence[int] = SEEDS, kinds: Iterable[str] = KINDS) -> list[str]:
    """A release's row of the table; of the `kinds` that are not asked for, as the page has it.

    Raises:
        ArchiveError, LoadError: its archive is not here, or does not load.
    """
    core = core_for(version)
    wanted, before = set(kinds), {}
    if missing := [kind for kind in KINDS if kind not in wanted]:
        kept = dict(zip(HEADER, rows_kept()[version], strict=True))
        before = {kind: kept[kind] for kind in missing}
    cells = [before.get(kind) or str(counted(version, kind, seeds, core)) for kind in KINDS]
    return [version, *cells, elsewhere(version)]


def elsewhere(version: str) -> str:
    """The rooms a release is served with besides, each with the page that has the proof."""
    rooms = PARTS[version].rooms
    return ", ".join(link for room, link in ELSEWHERE.items() if room in rooms) or "-"


def rows_kept() -> dict[str, list[str]]:
    """The rows of the table on the page, by release."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text.partition("<!-- features -->")[2].partition("<!-- /features -->")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row for row in rows[2:]}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.releases.features", description=__doc__
    )
    parser.add_argument("versions", nargs="*", help="releases to count; without any, all")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    versions = asked.versions or list(PARTS)
    if unknown := [version for version in versions if version not in PARTS]:
        parser.error(f"versions={unknown}: need some of {', '.join(PARTS)}")
    try:
        new = {version: row(version, kinds=asked.kinds) for version in versions}
    except (ArchiveError, LoadError) as error:
        parser.error(str(error))
    print(markdown_table(HEADER, list(new.values())))
    if asked.write:
        rows = {**rows_kept(), **new}
        table = [rows[version] for version in PARTS if version in rows]
        write_section("features", markdown_table(HEADER, table), PAGE)
    cells = [cell for each in new.values() for cell in each if cell.startswith("served")]
    return 0 if all(": 0 of" in cell for cell in cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
