"""Plots inside the course's figures: matplotlib lays them out, our canvas and theme draw them.

Promises: scales, ticks, labels, bars, error bars and legends are matplotlib's; the same calls give
the same bytes, in the classes that follow the reader's theme. It needs the extra `figures`; what
only imports this module does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from course.learning.labs import CourseError
from course.truth.figures import GREY, Svg

Ticks = Mapping[float, str] | Sequence[float] | None
"""Values with the words beside them, values that matplotlib words, or None: it chooses both."""


def written(path: Path, draw: Callable[[], str]) -> str:
    """Write a figure where it can be drawn here; in words what was written, or what is missing."""
    try:
        text = draw()
    except CourseError as error:
        return f"no {path.name}: {error}"
    path.write_text(text, encoding="utf-8")
    return f"wrote {path}"


class Axes:
    """A plot area inside an `Svg`: a thin face of one matplotlib axes at the same pixels."""

    def __init__(
        self,
        svg: Svg,
        box: tuple[float, float, float, float],
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        *,
        log_x: bool = False,
        log_y: bool = False,
    ) -> None:
        """Args: box is left, top, width, height in pixels; ranges are low, high in data units.

        What is drawn on the axes stands where the axes were made: later shapes of `svg` lie above.

        Raises:
            CourseError: matplotlib is not installed.
        """
        try:
            from course.truth import plot_canvas
        except ImportError as error:
            raise CourseError(
                f"A plot needs matplotlib ({error}): put `uv run --extra figures` in front"
            ) from error
        self.svg, self.box = svg, box
        self.axes: Any = plot_canvas.make_axes(svg.width, svg.height, box)
        self.axes.set(xlim=x_range, ylim=y_range)
        self.axes.set_xscale("log" if log_x else "linear")
        self.axes.set_yscale("log" if log_y else "linear")
        self.axes.minorticks_off()
        self.axes.set_axis_off()  # until `frame`
        svg.later(lambda: plot_canvas.draw(self.axes))

    def x(self, value: float) -> float:
        """Pixel of a data x."""
        return float(self.axes.get_xaxis_transform().transform((value, 0))[0])

    def y(self, value: float) -> float:
        """Pixel of a data y."""
        return self.svg.height - float(self.axes.get_yaxis_transform().transform((0, value))[1])

    def frame(
        self, x_label: str, y_label: str, x_ticks: Ticks = None, y_ticks: Ticks = None
    ) -> None:
        """Grid, ticks and axis names; the name of y stands above its axis."""
        self.axes.set_axis_on()
        self.axes.set_xlabel(x_label)
        self.axes.set_title(y_label, loc="left")
        for axis, ticks in ((self.axes.xaxis, x_ticks), (self.axes.yaxis, y_ticks)):
            if isinstance(ticks, Mapping):
                axis.set_ticks(list(ticks), list(ticks.values()))
            elif ticks is not None:
                axis.set_ticks(list(ticks))

    def curve(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str,
        *,
        width: float = 2,
        dash: str | None = None,
        name: str | None = None,
    ) -> None:
        """A line through data points, with its `name` in the legend if it has one."""
        xs, ys = zip(*points, strict=True)
        style = _style(dash, width)
        self.axes.plot(xs, ys, color=stroke, linewidth=width, linestyle=style, label=name)

    def dots(
        self,
        points: Sequence[tuple[float, float]],
        fill: str,
        *,
        radius: float = 4,
        tips: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        """A circle at each data point; its `tips`, or its value, appear under the pointer."""
        xs, ys = zip(*points, strict=True)
        said = tips or [f"{x:.6g}, {y:.6g}" for x, y in points]
        self.axes.plot(
            xs, ys, "o", color=fill, markersize=2 * radius, gid="\n".join(said), label=name
        )

    def bars(
        self,
        points: Sequence[tuple[float, float]],
        fill: str,
        *,
        width: float = 0.8,
        base: float | Sequence[float] = 0,
        opacity: float = 0.75,
        stroke: str = "none",
        lying: bool = False,
        tips: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        """Bars of (place, length) from `base`, standing, or `lying` along x."""
        places, lengths = zip(*points, strict=True)
        bar, span = (self.axes.barh, "height") if lying else (self.axes.bar, "width")
        from_ = "left" if lying else "bottom"
        shared: dict[str, Any] = {span: width, from_: base, "label": name}
        drawn = bar(places, lengths, facecolor=(fill, opacity), edgecolor=stroke, **shared)
        for patch, tip in zip(drawn, tips, strict=False):
            patch.set_gid(tip)

    def spans(
        self,
        spans: Sequence[tuple[float, float, float]],
        stroke: str,
        *,
        width: float = 1.6,
        lying: bool = False,
    ) -> None:
        """Lines of (place, low, high): intervals, standing at x, or `lying` at y."""
        lines = self.axes.hlines if lying else self.axes.vlines
        lines(*zip(*spans, strict=True), colors=stroke, linewidth=width)

    def rule(
        self,
        *,
        x: float | None = None,
        y: float | None = None,
        stroke: str = GREY,
        width: float = 1,
        dash: str | None = "5 4",
    ) -> None:
        """A line across the whole plot at one x or one y."""
        style = _style(dash, width)
        if x is not None:
            self.axes.axvline(x, color=stroke, linewidth=width, linestyle=style)
        if y is not None:
            self.axes.axhline(y, color=stroke, linewidth=width, linestyle=style)

    def label(
        self,
        x: float,
        y: float,
        words: str,
        fill: str | None = None,
        *,
        dx: float = 6,
        dy: float = 4,
        anchor: str = "start",
    ) -> None:
        """Words beside a data point, `dx` and `dy` pixels to the right and down of it."""
        align = {"start": "left", "middle": "center", "end": "right"}[anchor]
        color = {"color": fill} if fill else {}
        self.axes.annotate(
            words, (x, y), (dx, -dy), textcoords="offset pixels", annotation_clip=False,
            ha=align, va="baseline", **color,
        )  # fmt: skip

    def legend(self, x: float, y: float, *, columns: int = 1) -> None:
        """The names given so far, in rows of `columns`, from pixel (x, y) to the right and down."""
        from course.truth import plot_canvas

        self.axes.legend(
            loc="upper left", bbox_to_anchor=(x, self.svg.height - y), ncols=columns,
            bbox_transform=plot_canvas.PIXELS,
        )  # fmt: skip


def _style(dash: str | None, width: float) -> Any:
    """A dash in pixels as matplotlib takes it, in widths of the line."""
    return (0, [float(part) / width for part in dash.split()]) if dash else "-"
