"""The playground: one run decided by a release of vLLM and by mini_vllm, every step of both to see.

The run is that of `course.site.live` with the toy model. Promises: the real scheduler's frames have
the form of `live.Session.frames`, so that one script draws both; what stands beside it decides with
the pin's rules, or with those of the release where these are proved (`mini_vllm.releases`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.features.core.recorder import observe
from course.site import gantt, live, live_link, live_real
from mini_vllm.observe.trace import StepRecord
from mini_vllm.releases import PARTS, PIN, parts_of

_LINK = re.compile(r"#?vllm=([\d.]{5,12})&beside=([\d.]{5,12})&(live=.*)", re.DOTALL)


def play(
    settings: dict[str, Any],
    requests: Sequence[Any],
    aborts: Sequence[Sequence[Any]] = (),
    release: str = PIN,
    beside: str = PIN,
) -> dict[str, Any]:
    """Decide a run twice, to the end of both.

    Args:
        settings, requests, aborts: as for `live.start`.
        release: of vLLM.
        beside: the release whose rules mini_vllm takes; one of `mini_vllm.releases.PARTS`.

    Returns:
        As `live_real.compared`, without its steps; and `real` and `ours`, the frames of both;
        `settings`, `bounds`, `requests`, `aborts`; `beside`; `link`.

    Raises:
        ValueError: bad settings or requests, or a release that is not here or not proved, by name.
    """
    if beside not in PARTS:
        raise ValueError(f"beside={beside!r}: need one of {', '.join(PARTS)}")
    asked = [live.Wanted.of(one) for one in requests]
    pairs = [(step, name) for step, name in aborts]
    session = live.Session(
        live.Settings.of(settings), asked, pairs, model="toy", parts=parts_of(beside)
    )
    session.go(live.MOST_STEPS)
    frames = Frames(session)
    told = live_real.compared(session, release, frames)
    run = session.document()
    kept = {name: run[name] for name in ("settings", "bounds", "requests", "aborts")}
    return {
        "release": told["release"], "difference": told["difference"], "beside": beside, **kept,
        "real": _marked(frames.made), "ours": _marked(run["frames"]),
        "link": f"vllm={release}&beside={beside}&{run['link']}",
    }  # fmt: skip


def open_link(link: str) -> dict[str, Any]:
    """The run of a link, with its releases.

    Raises:
        ValueError: not a link of ours, or one with bad values, by name.
    """
    match = _LINK.fullmatch(link) if isinstance(link, str) else None
    if match is None:
        raise ValueError("link: need one that begins with vllm=RELEASE&beside=RELEASE&live=1")
    told = live_link.read(match[3])
    del told["at"]
    return play(**told, release=match[1], beside=match[2])


def _marked(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Frames that can be compared by eye: in both, a block is new that was not in the table before.

    Reasons are their words alone.
    """
    made, before = [], frames[0]["pool"]
    for frame in frames:
        pool = frame["pool"]
        fresh = {
            block
            for name, table in pool["tables"].items()
            for block in set(table) - set(before["tables"].get(name, ())) - set(pool["hits"])
        }
        lost = sorted(block for block in fresh if before["hashes"][block])
        why = [{name: each[name] for name in ("name", "about", "text")} for each in frame["why"]]
        made.append({**frame, "pool": {**pool, "fresh": sorted(fresh), "lost": lost}, "why": why})
        before = pool
    return made


class Frames:
    """A `live_real.Watcher`: the real scheduler's steps as frames of `live.Session`."""

    def __init__(self, session: live.Session) -> None:
        """Before step 0, which both begin alike."""
        self.session = session
        self.made: list[dict[str, Any]] = [session.frames[0]]
        self._names: dict[Any, str] = {}
        self._most_computed: dict[str, int] = {}

    def planned(self, scheduler: Any, plan: Any, requests: Mapping[str, Any]) -> None:
        """Note the plan, the queues and the pool."""
        self._requests = dict(requests)
        told, counts = observe(scheduler, plan), plan.num_scheduled_tokens
        computed = {name: requests[name].num_computed_tokens - counts[name] for name in counts}
        admitted = [*told["new"], *told["resumed"]]
        hits = {name: computed[name] for name in admitted if computed[name]}
        tables, resumed = told["block_ids"], [n for n in counts if n in told["resumed"]]
        self._record = StepRecord(
            len(self.made) - 1, dict(counts), hits, computed, told["new"], resumed,
            told["preempted"], told["running"], told["waiting"], tables, told["free_blocks"], {}, {}
        )  # fmt: skip
        self._pool = self._shown(scheduler.kv_cache_manager.block_pool, tables, hits)

    def _shown(
        self, pool: Any, tables: dict[str, list[int]], hits: Mapping[str, int]
    ) -> dict[str, Any]:
        """As `live_watch.Pool.shown`, less what `_marked` adds."""
        names = self._names
        hashes = [block.block_hash for block in pool.blocks]
        for value in hashes:
            if value is not None:
                names.setdefault(value, f"h{len(names) + 1}")
        size = self.session.settings.block_size
        hit = {block for name, tokens in hits.items() for block in tables[name][: tokens // size]}
        return {
            "refs": [block.ref_cnt for block in pool.blocks],
            "hashes": ["" if value is None else names[value] for value in hashes],
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "tables": tables, "hits": sorted(hit),
        }  # fmt: skip

    def updated(self, sampled: Mapping[str, int]) -> None:
        """Note what was sampled and who ended: the frame is whole."""
        record, requests = self._record, self._requests
        record.sampled.update(sampled)
        for name in record.num_scheduled_tokens:
            if requests[name].is_finished():
                record.finished[name] = str(requests[name].get_finished_reason())
        cells = {
            name: gantt.cell_of(record, record.step, request, self._most_computed.get(name, 0))
            for name, request in requests.items()
        }
        for name, cell in cells.items():
            end = cell["computed"] + cell["tokens"]
            self._most_computed[name] = max(self._most_computed.get(name, 0), end)
        batch = ("tokens", "kind", "hit", "computed", "known", "sampled")
        self.made.append({
            "step": record.step, "cells": cells, "running": record.running, "pool": self._pool,
            "total": gantt.totals_of(record, record.step, self.session.engine),
            "batch": [
                {"id": name, **{key: cells[name][key] for key in batch}}
                for name in record.num_scheduled_tokens
            ],
            "waiting": record.waiting, "texts": dict.fromkeys(requests, ""), "why": [],
        })  # fmt: skip
