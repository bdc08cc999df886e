"""Which machine a measurement comes from: the processor's own name and its cores, nothing else.

Mirrors nothing upstream.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """The processor's own name; where the system does not tell it, the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def describe() -> dict[str, str | int]:
    """Both, as a saved measurement keeps them."""
    return {"cpu": processor(), "cores": cores()}
