"""Which machine a measurement comes from: processor name and core count, nothing else."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> dict[str, str | int]:
    """The processor's own name and the cores this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    affinity = getattr(os, "sched_getaffinity", None)
    return {"cpu": name, "cores": len(affinity(0)) if affinity else os.cpu_count() or 1}
