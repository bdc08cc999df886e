"""A matplotlib backend that draws onto the course's `Svg`, in its classes.

Promises: no identifiers, dates or fonts of the machine in what is written, two decimals, and one
element per path, point and text. matplotlib's own SVG backend fixes colours, which a dark page
cannot turn, and clips by identifiers that would have to differ between the figures of one page.
"""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.ticker import LogFormatter, ScalarFormatter
from matplotlib.transforms import Affine2D, IdentityTransform

from course.truth.figures import GREY, INK, SOFT, num

# One point is one pixel. DejaVu Sans comes with matplotlib, so that every machine measures alike.
RULES: dict[str, Any] = {
    "figure.dpi": 72,
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 1,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.labelpad": 8,
    "axes.labelsize": 12,
    "axes.titlesize": 12,
    "axes.titlepad": 10,
    "axes.unicode_minus": False,
    "axes.formatter.useoffset": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 1,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "legend.borderaxespad": 0,
    "legend.borderpad": 0,
    "legend.handlelength": 1.8,
    "legend.handletextpad": 0.5,
    "legend.labelspacing": 0.45,
    "path.simplify": False,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 7,
    "ytick.major.pad": 7,
}
LINE_CLASSES = {INK: "ink-line", GREY: "soft-line"}
TEXT_CLASSES = {INK: "ink", SOFT: "soft"}
PIXELS = IdentityTransform()
ANCHORS = {"left": "start", "center": "middle", "right": "end"}


def make_axes(width: float, height: float, box: tuple[float, float, float, float]) -> Axes:
    """Axes at `box` (left, top, width, height) of a canvas; all in pixels.

    matplotlib's defaults become `RULES`, whatever a matplotlibrc of this machine says.
    """
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(RULES)
    left, top, wide, high = box
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    return figure.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))


def draw(axes: Axes) -> str:
    """The elements of what was put on `axes`; lines are not cut at its edges."""
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), (LogFormatter, ScalarFormatter)):
            axis.set_major_formatter("{x:,.10g}")
    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = _Renderer(*(figure.get_size_inches() * 72))
    axes.draw(renderer)
    return "\n".join(renderer.parts)


class _Renderer(RendererBase):
    """What matplotlib asks of a backend, written as elements; y grows downwards."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__()
        self.width, self.height = width, height
        self.parts: list[str] = []
        self._tips: list[str] = []

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self.width, self.height

    def points_to_pixels(self, points: Any) -> Any:
        return points

    def open_group(self, s: str, gid: str | None = None) -> None:
        self._tips = gid.split("\n") if gid else []

    def draw_path(self, gc: Any, path: Path, transform: Any, rgbFace: Any = None) -> None:
        shape = _shape(path, transform + Affine2D().scale(1, -1).translate(0, self.height))
        fill, stroke = _fill(gc, rgbFace), _stroke(gc)
        if shape and (fill or stroke):
            inside = fill or ' fill="none"'
            self._add(f'<path d="{shape}"{inside}{stroke}', self._tips[:1])

    def draw_markers(
        self, gc: Any, marker_path: Any, marker_trans: Any, path: Any, trans: Any,
        rgbFace: Any = None,
    ) -> None:  # fmt: skip
        """Circles, the only marker of ours, each with its tip."""
        radius = marker_path.get_extents(marker_trans).width / 2
        for place, (x, y) in enumerate(trans.transform(path.vertices)):
            circle = f'<circle cx="{num(x)}" cy="{num(self.height - y)}" r="{num(radius)}"'
            self._add(circle + _fill(gc, rgbFace), self._tips[place : place + 1])

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float,
        ismath: Any = False, mtext: Any = None,
    ) -> None:  # fmt: skip
        """Words with the reader's font, anchored as they were aligned."""
        anchor, color = "start", to_hex(gc.get_rgb())
        if mtext is not None and not angle:
            x = mtext.get_transform().transform(mtext.get_unitless_position())[0]
            anchor = ANCHORS[mtext.get_horizontalalignment()]
        look = f'class="{TEXT_CLASSES[color]}"' if color in TEXT_CLASSES else f'fill="{color}"'
        turn = f' transform="rotate({num(-angle)} {num(x)} {num(y)})"' if angle else ""
        self.parts.append(
            f'<text x="{num(x)}" y="{num(y)}" font-size="{num(prop.get_size_in_points())}" '
            f'text-anchor="{anchor}" {look}{turn}>{escape(s)}</text>'
        )

    def _add(self, element: str, tip: list[str]) -> None:
        body = f"><title>{escape(tip[0])}</title></{element[1:].split()[0]}>" if tip else "/>"
        self.parts.append(element + body)


def _shape(path: Path, transform: Any) -> str:
    """The `d` of a path."""
    words: list[str] = []
    letters = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
    for points, code in path.iter_segments(transform, simplify=False, curves=True):
        if code == Path.CLOSEPOLY:
            words.append("Z")
        elif code in letters:
            words.append(letters[code] + " ".join(num(float(point)) for point in points))
    return "".join(words).replace("ML", "M")


def _fill(gc: Any, face: Any) -> str:
    if face is None or (len(face) > 3 and face[3] == 0):
        return ""
    opacity = gc.get_alpha() if gc.get_forced_alpha() else face[3] if len(face) > 3 else 1
    return f' fill="{to_hex(face)}"' + (f' fill-opacity="{num(opacity)}"' if opacity < 1 else "")


def _stroke(gc: Any) -> str:
    width, (red, green, blue, opacity) = gc.get_linewidth(), gc.get_rgb()
    if width == 0 or opacity == 0:
        return ""
    color = to_hex((red, green, blue))
    if color == GREY and opacity == RULES["grid.alpha"]:
        return f' class="grid-line" stroke-width="{num(width)}"'
    look = f' class="{LINE_CLASSES[color]}"' if color in LINE_CLASSES else f' stroke="{color}"'
    _, dashes = gc.get_dashes()
    dash = " ".join(num(float(part)) for part in dashes) if dashes is not None else ""
    look += f' stroke-dasharray="{dash}"' if dash else ""
    look += f' stroke-opacity="{num(opacity)}"' if opacity < 1 else ""
    return f'{look} stroke-width="{num(width)}" stroke-linejoin="round"'
