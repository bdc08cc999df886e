"""Where a measurement comes from, written by the program that measures."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from typing import Any

from course import machine
from labkit import versions


def provenance(program: str) -> dict[str, Any]:
    """Hardware, versions, date and the command, as a capture of a lab names them."""
    cards = machine.gpus()
    return {
        "gpus": [name for name, _, _ in cards],
        "driver": cards[0][1] if cards else "none",
        "cuda": versions.cuda() if cards else "none",
        "packages": versions.installed(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
    }
