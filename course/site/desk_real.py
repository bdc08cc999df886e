"""A lab's desk asks vLLM: one workload, decided by the learner's text and by the real scheduler.

Promises: the text is loaded as a module of its own, and a text that cannot be loaded, lacks its
class or raises is told as such; the reference parts of the engine do the rest.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from conformance import replay, workload_file
from conformance.ask import MEANINGS, ask, plan_of
from conformance.words import show
from course.files import load_module
from course.learning.mine import attribute_of
from course.site import live_real

PARTS = ("block_pool", "kv_cache_manager", "scheduler")
"""Parts whose labs can ask: those that decide."""


def ask_mine(part: str, text: str, workload: str, release: str = live_real.PIN) -> dict[str, Any]:
    """Decide a workload with the class that `text` defines for `part`, and with vLLM.

    Args:
        part: one of `PARTS`.
        text: a lab's file.
        workload: a seed of the recordings, or the short form of `conformance/workload_file.py`.

    Returns:
        `release`, `rows` (a line of each for every step; the second is "" after the first
        difference) and `difference`: None, or `step`, `field`, `words`, `real`, `ours`.

    Raises:
        ValueError: one of the arguments cannot be read, by name.
    """
    if part not in PARTS:
        raise ValueError(f"part={part!r}: need one of {', '.join(PARTS)}")
    try:
        given = workload.strip()
        asked = workload_file.read(given) if given.isdecimal() else workload_file.parse(workload)
    except workload_file.WorkloadError as error:
        raise ValueError(f"workload: {error}") from None
    core = live_real.core(release)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "starter.py"
        path.write_text(text, encoding="utf-8")
        try:
            made = getattr(load_module(path, "_lab_asked"), attribute_of(part))
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"starter.py does not load: {type(error).__name__}: {error}"
            ) from error
    parts: dict[str, Any] = {part: made}
    answer = ask(asked, core, functools.partial(replay.mini_scheduler, **parts))
    rows = [
        [plan_of(step), plan_of(answer.ours[place]) if place < len(answer.ours) else ""]
        for place, step in enumerate(answer.real)
    ]
    found = answer.difference
    difference = None
    if found is not None:
        difference = {
            "step": found.step, "field": found.field,
            "words": MEANINGS.get(found.field, found.field),
            "real": show(found.expected), "ours": show(found.got),
        }  # fmt: skip
    told = {"release": core.version, "rows": rows, "difference": difference}
    return {**told, "fault": answer.fault}
