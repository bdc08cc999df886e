"""A small SVG writer for the course's figures: shapes, axes, and what is out of date.

Promises: the same calls give the same bytes; text and lines follow the reader's light or dark
theme through one media query; every figure carries a title and a description for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from course.files import load_module

# Mid-tones that read on white and on near-black; chosen apart in lightness as well as in hue.
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#3f86d8",
    "#e0862e",
    "#3fa162",
    "#9a6fd8",
    "#d9534f",
    "#8b949e",
)
INK, SOFT = "#24292f", "#57606a"  # in the light; written as classes, which the dark changes
SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)

_STYLE = """
text{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.ink{fill:#24292f}.soft{fill:#57606a}.ink-line{stroke:#24292f}.soft-line{stroke:#8b949e}
.grid-line{stroke:#8b949e;stroke-opacity:.25}.paper{fill:#8b949e;fill-opacity:.08}
@media (prefers-color-scheme:dark){
.ink{fill:#e6edf3}.soft{fill:#9da7b1}.ink-line{stroke:#e6edf3}}
"""


def num(value: float) -> str:
    """A coordinate as text: at most two decimals, no trailing zeros, never "-0"."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


class Svg:
    """One figure under construction; coordinates are pixels from the top left."""

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str | Callable[[], str]] = []

    def later(self, element: Callable[[], str]) -> None:
        """Append what is asked for only when the document is written."""
        self._parts.append(element)

    def raw(self, element: str) -> None:
        """Append an element as it is."""
        self._parts.append(element)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        anchor: str = "start",
        css: str = "ink",
        fill: str | None = None,
        bold: bool = False,
        rotate: float | None = None,
    ) -> None:
        """`words` with their baseline at (x, y); `css` is "ink", "soft", with "mono" added."""
        extra = f' style="fill:{fill}"' if fill else ""
        extra += ' font-weight="600"' if bold else ""
        if rotate is not None:
            extra += f' transform="rotate({num(rotate)} {num(x)} {num(y)})"'
        self.raw(
            f'<text x="{num(x)}" y="{num(y)}" font-size="{num(size)}" text-anchor="{anchor}" '
            f'class="{css}"{extra}>{escape(words)}</text>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        stroke: str | None = None,
        css: str = "soft-line",
        width: float = 1,
        dash: str | None = None,
        arrow: bool = False,
    ) -> None:
        """A straight line, with an arrow head at its end if asked."""
        style = f' stroke="{stroke}"' if stroke else f' class="{css}"'
        style += f' stroke-dasharray="{dash}"' if dash else ""
        self.raw(
            f'<line x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}"{style} '
            f'stroke-width="{num(width)}"/>'
        )
        if arrow:
            angle = math.atan2(y2 - y1, x2 - x1)
            points = " ".join(
                f"{num(x2 - 8 * math.cos(angle + turn))},{num(y2 - 8 * math.sin(angle + turn))}"
                for turn in (-0.45, 0.45)
            )
            self.raw(
                f'<polyline points="{points.split()[0]} {num(x2)},{num(y2)} {points.split()[1]}" '
                f'fill="none"{style} stroke-width="{num(width)}"/>'
            )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str | None = None,
        opacity: float = 1.0,
        stroke: str | None = None,
        css: str | None = None,
        radius: float = 0,
        tip: str | None = None,
    ) -> None:
        """A rectangle; `tip` is shown when the pointer rests on it."""
        style = f' fill="{fill}" fill-opacity="{num(opacity)}"' if fill else ""
        style += f' class="{css}"' if css else ""
        if not fill and not css:
            style += ' fill="none"'
        style += f' stroke="{stroke}"' if stroke else ""
        body = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.raw(
            f'<rect x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}" '
            f'rx="{num(radius)}"{style}{body}'
        )

    def circle(self, x: float, y: float, radius: float, fill: str, tip: str | None = None) -> None:
        """A filled circle."""
        body = f"><title>{escape(tip)}</title></circle>" if tip else "/>"
        self.raw(f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(radius)}" fill="{fill}"{body}')

    def polyline(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str,
        *,
        width: float = 2,
        dash: str | None = None,
    ) -> None:
        """A line through `points`."""
        style = f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{num(x)},{num(y)}" for x, y in points)
        self.raw(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" '
            f'stroke-width="{num(width)}" stroke-linejoin="round"{style}/>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str],
        *,
        fill: str = GREY,
        size: float = 13,
    ) -> None:
        """A rounded box with centred lines of text, the first in bold."""
        self.rect(x, y, width, height, fill=fill, opacity=0.18, stroke=fill, radius=6)
        top = y + height / 2 - (len(lines) - 1) * size * 0.65 + size * 0.36
        for row, words in enumerate(lines):
            self.text(
                x + width / 2,
                top + row * size * 1.3,
                words,
                size=size if row == 0 else size - 1.5,
                anchor="middle",
                css="ink" if row == 0 else "soft",
                bold=row == 0,
            )

    def cell(
        self, x: float, y: float, width: float, words: str, fill: str, opacity: float = 0.45
    ) -> None:
        """A small filled box with words in it: a token, a block, a request in one step."""
        self.rect(x, y, width, 26, fill=fill, opacity=opacity, radius=4)
        self.text(x + width / 2, y + 18, words, anchor="middle", css="ink mono")

    def render(self) -> str:
        """The SVG document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {num(self.width)} '
            f'{num(self.height)}" width="{num(self.width)}" height="{num(self.height)}" '
            f'role="img" aria-label={quoteattr(self.title)}>'
        )
        described = f"<desc>{escape(self.description)}</desc>" if self.description else ""
        parts = [head, f"<title>{escape(self.title)}</title>{described}"]
        drawn = [part if isinstance(part, str) else part() for part in self._parts]
        return "\n".join([*parts, f"<style>{_STYLE}</style>", *drawn, "</svg>", ""])


def folders(root: Path) -> list[Path]:
    """Every folder of figures: those of the phases, then the book's."""
    found = sorted(root.glob("phase-*/figures"))
    return [path for path in (*found, root / "book" / "figures") if any(path.glob("figures_*.py"))]


def collect(folder: Path) -> dict[str, Callable[[], str]]:
    """The `FIGURES`, file name to drawing function, of a folder.

    They stand in its `figures_*.py` and in those of the `experiments` beside it.

    Raises:
        ValueError: two of them name the same file.
    """
    figures: dict[str, Callable[[], str]] = {}
    scripts = [folder, folder.parent / "experiments"]
    for path in [script for each in scripts for script in sorted(each.glob("figures_*.py"))]:
        own = load_module(path).FIGURES
        if twice := figures.keys() & own.keys():
            raise ValueError(f"{path.name}: {', '.join(sorted(twice))} is drawn twice")
        figures |= own
    return figures


def stale(folder: Path, figures: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """File name to the text drawn now, of each of `figures` whose file is missing or another.

    A file that nothing draws is stale too; its text is "".
    """
    texts = {path.name: "" for path in folder.glob("*.svg") if path.name not in figures}
    for name, draw in figures.items():
        path, text = folder / name, draw()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            texts[name] = text
    return texts
