"""The figure of lab 04-02. Choices and reasons come from the lab's solution.

No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from course.files import load_module
from course.truth.figures import BLUE, GREEN, RED, Svg

LAB = Path(__file__).resolve().parents[1] / "labs" / "lab-02-backend-selection"


def solution() -> ModuleType:
    """The lab's reference solution as a module of its own."""
    return load_module(LAB / "solution.py")


def walk() -> str:
    """One layer with attention sinks, three devices, three lists with their reasons."""
    lab = solution()
    cfg = lab.SelectorConfig(head_size=64, dtype="bfloat16", has_sink=True)
    title = "One layer, three GPUs: bf16, heads of 64, attention sinks"
    svg = Svg(800, 346, title, "")
    svg.text(12, 24, title, bold=True)
    said = [title + "."]
    devices = (((8, 0), "A100"), ((9, 0), "H100"), ((10, 0), "B200"))
    short = {"sink not supported on compute capability < 9.0": "sinks need 9.0"}
    for column, (capability, name) in enumerate(devices):
        device = lab.Device(capability)
        chosen = lab.select_backend(cfg, device).name
        x = 12 + 262 * column
        svg.text(x, 54, f"{name}, {capability[0]}.{capability[1]}", bold=True, size=13)
        for row, backend in enumerate(lab.priorities(cfg, device)):
            y = 66 + 54 * row
            reasons = lab.validate_configuration(backend, cfg, device)
            color = GREEN if backend == chosen else RED if reasons else BLUE
            words = [short.get(r, r.replace(" not supported", "")) for r in reasons]
            note = "no: " + "; ".join(words)
            if not reasons:
                note = "chosen" if backend == chosen else "valid"
            svg.rect(x, y, 252, 46, fill=color, opacity=0.2, radius=5, stroke=color)
            svg.text(x + 10, y + 19, f"{row + 1}  {backend}", size=12, bold=True)
            svg.text(x + 10, y + 37, note, size=10.5, css="soft")
            said.append(f"{name}, {row + 1}, {backend}: {note}.")
    svg.description = " ".join(said)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {"lab-02-walk.svg": walk}
