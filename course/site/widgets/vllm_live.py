"""The playground: one run, decided by a release of vLLM and by mini_vllm."""

from __future__ import annotations

from typing import Any

from course.site import live, live_real, real_payload
from course.site.play_pins import RUNTIME_BYTES
from course.site.widgets.scheduler_desk import MODEL_BYTES
from mini_vllm.releases import PARTS, PIN

NEEDS = ("live-views", "live-form", "live-real")


def document() -> dict[str, Any]:
    """The run it begins with, and the releases that the site has."""
    return {
        **live.defaults(), "releases": real_payload.offered(live_real.ROOT), "proved": list(PARTS),
        "pin": PIN, "bytes": RUNTIME_BYTES - MODEL_BYTES,
    }  # fmt: skip
