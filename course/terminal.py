"""The terminal: text that wraps by itself, and no colour codes when it is a pipe."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COMMAND = re.compile(
    r"\b(course (?:ask|bench|bisect|book|challenge|check|cite|demo|docs|doctor|drift|engine"
    r"|exercise|export|figures|first|gpu|hint|hunt|import|incident|mine|museum|new|predict|quiz|read"
    r"|release|replay|reset|run|selfcheck|serve|solution|starters|trace|upstream|watch|why|words)\b"
    r"|(?<=: )course$)"
)
_EXTRAS = {
    "course upstream fetch": "upstream",  # without git, or GitHub, the tree comes from an index
    "course book serve": "book",
    "course book build": "book",
    "course serve": "serve",
}


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
    return _COMMAND.sub(lambda m: _typed(text, m), text)


def _typed(text: str, command: re.Match[str]) -> str:
    """A command with `uv run`, and the extra that it needs, unless it has them already."""
    if re.search(r"uv run (?:--extra \w+ )*$", text[: command.start()]):
        return command[0]
    rest = text[command.start() :]
    extra = next((extra for name, extra in _EXTRAS.items() if rest.startswith(name)), "")
    return f"uv run {f'--extra {extra} ' if extra else ''}{command[0]}"


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
