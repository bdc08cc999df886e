"""The terminal: text that wraps by itself, and no colour codes when it is a pipe."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COMMAND = re.compile(
    r"\b(course (?:ask|bisect|challenge|check|cite|demo|docs|doctor|drift|engine|export|figures"
    r"|gpu|hint|hunt|import|incident|mine|museum|new|predict|quiz|read|release|replay|reset|run"
    r"|selfcheck|solution|starters|trace|upstream|watch|why|words)\b"
    r"|(?<=: )course$)"
)


def make_console(stderr: bool = False) -> Console:
    """A console that never highlights on its own and survives a terminal without Unicode."""
    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(console: Console, text: str, style: str | None = None) -> None:
    """One paragraph, wrapped by the terminal and never by us (so that commands can be copied)."""
    raw(console, as_typed(text), style)


def raw(console: Console, text: str, style: str | None = None) -> None:
    """Text that is not ours, as it is."""
    console.print(Text(text, style=style or ""), soft_wrap=True)


def as_typed(text: str) -> str:
    """`text` with our commands as this learner must type them: after `uv run`, or bare."""
    if "UV_RUN_RECURSION_DEPTH" not in os.environ:
        return text
    # Without git at hand, or GitHub within reach, the tree comes from the package index.
    text = text.replace("course upstream fetch", "uv run --extra upstream course upstream fetch")
    return _COMMAND.sub(lambda m: m[0] if _typed(text, m) else f"uv run {m[0]}", text)


def _typed(text: str, command: re.Match[str]) -> bool:
    """Whether the command has its `uv run` already."""
    return bool(re.search(r"uv run (?:--extra \w+ )*$", text[: command.start()]))


def printable(text: str) -> str:
    """`text` with control characters made visible: sampled bytes must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def relative(path: Path, root: Path) -> str:
    """`path` as seen from where the learner stands, else from the root."""
    for base in (Path.cwd(), root):
        try:
            return str(path.relative_to(base))
        except ValueError:
            continue
    return str(path)


def counted(count: int, word: str, many: str = "") -> str:
    """`2`, `lab` as "2 labs"; `many` where the plural takes more than an s."""
    return f"{count} {word}" if count == 1 else f"{count} {many or word + 's'}"


def hours(minutes: int) -> str:
    """`95` as "1 h 35 min"."""
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
