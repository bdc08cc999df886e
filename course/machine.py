"""Which machine a measurement comes from: processor, cores and GPUs by their own names."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
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


def gpus() -> list[tuple[str, str, str]]:
    """(name, driver, memory) of each GPU as its driver tells them; empty where none answers."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in answer.stdout.splitlines()]
    return [(row[0].strip(), row[1].strip(), row[2].strip()) for row in rows if len(row) == 3]


def describe() -> dict[str, str | int]:
    """Processor and cores, as a saved measurement keeps them."""
    return {"cpu": processor(), "cores": cores()}
