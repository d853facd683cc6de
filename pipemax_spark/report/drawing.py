"""Draw panels with two axes, lines, bands, bars and dots as SVG text, one below another.

Coordinates are pixels of a drawing. Text and black lines are in ``currentColor``, which a page can set. Points that
share a column or a place of pixels are drawn once, so that weeks of reports make a page of kilobytes. Nothing has an
id: any drawings may share a page. This module knows nothing of engines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, isfinite, log10

WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM, _KEY_ROW = 70, 14, 26, 42, 20
_TICK_STEPS = (1, 2, 5, 10)
_MOST_TICKS = 6
_DOT = 3
"""Pixels of a dot, and of the grid that dots are set on."""
_STYLE = "font-family='system-ui, sans-serif' font-size='12' color='#222' fill='currentColor'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The range of an axis, linear or logarithmic, and its label."""

    low: float
    high: float
    label: str = ""
    is_log: bool = False
    is_whole: bool = False
    """Whether only whole numbers have a meaning."""

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.is_log and self.low <= 0):
            raise ValueError(
                f"an axis goes from a number to a larger one, if logarithmic from above 0: {self}"
            )

    def share(self, value: float) -> float:
        """Return where the value lies, 0 at ``low`` and 1 at ``high``."""
        if self.is_log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return few round numbers within the range."""
        if self.is_log:
            decades = [10.0**power for power in range(floor(log10(self.low)), ceil(log10(self.high)) + 1)]
            fine = [part * decade for decade in decades for part in (1, 2, 5)]
            inside = [tick for tick in fine if self.low <= tick <= self.high]
            return inside if len(inside) <= _MOST_TICKS else [tick for tick in inside if tick in decades]
        rough = (self.high - self.low) / _MOST_TICKS
        unit = 10.0 ** floor(log10(rough))
        step = next(part * unit for part in _TICK_STEPS if part * unit >= rough * 0.999)
        step = max(step, 1.0) if self.is_whole else step
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def round_up(value: float) -> float:
    """Return a round number that is no less than the value, and 1 for what is not above 0."""
    if not value > 0:
        return 1.0
    unit = 10.0 ** floor(log10(value))
    return next(part * unit for part in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if part * unit >= value * 0.999)


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of the legend."""

    name: str
    color: str
    is_area: bool = False
    is_dashed: bool = False


class Panel:
    """One pair of axes. What is drawn later lies over what was drawn before."""

    def __init__(self, x: Axis, y: Axis, *, height: int, title: str = "", width: int = WIDTH) -> None:
        self._x, self._y, self._height, self._title, self.width = x, y, height, title, width
        self._shapes: list[str] = []
        self._keys: list[Key] = []

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str, *, is_dashed: bool = False) -> None:
        """Draw a line through the points that are finite: in each column of pixels the lowest and the highest."""
        points = [self._place(x, y) for x, y in zip(xs, ys, strict=True) if isfinite(x) and isfinite(y)]
        thin: list[tuple[float, float]] = []
        for _, column in groupby(points, key=lambda point: round(point[0])):
            here = list(column)
            ends = {here[0], here[-1], min(here, key=lambda p: p[1]), max(here, key=lambda p: p[1])}
            thin += [point for point in dict.fromkeys(here) if point in ends]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in thin)
        dashes = " stroke-dasharray='5 4'" if is_dashed else ""
        self._shapes.append(
            f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.3'{dashes}/>"
        )

    def band(self, begin: float, end: float, color: str) -> None:
        """Shade the panel between two values of x."""
        left, right = (self._place(x, self._y.low)[0] for x in (begin, end))
        self._shapes.append(
            f"<rect x='{left:.1f}' y='{_TOP}' width='{right - left:.1f}' height='{self._height}' fill='{color}' "
            "fill-opacity='0.35'/>"
        )

    def bars(self, bars: Iterable[tuple[float, float, float]], color: str) -> None:
        """Draw a bar from the floor for each (begin, end, value of y)."""
        for begin, end, value in bars:
            (left, top), (right, floor_y) = self._place(begin, value), self._place(end, self._y.low)
            self._shapes.append(
                f"<rect x='{left:.1f}' y='{top:.1f}' width='{max(0.5, right - left - 1):.1f}' "
                f"height='{floor_y - top:.1f}' fill='{color}'/>"
            )

    def dots(self, points: Iterable[tuple[float, float, str]]) -> None:
        """Draw a dot at each (x, y), in its colour."""
        by_color: dict[str, dict[tuple[int, int], None]] = {}
        for x, y, color in points:
            left, top = self._place(x, y)
            by_color.setdefault(color, {})[round(left / _DOT) * _DOT, round(top / _DOT) * _DOT] = None
        for color, places in by_color.items():
            path = "".join(f"M{left} {top}h0" for left, top in places)
            self._shapes.append(
                f"<path d='{path}' stroke='{color}' stroke-width='{_DOT}' stroke-linecap='round'/>"
            )

    def explain(self, keys: Iterable[Key]) -> None:
        """Add a legend below the panel."""
        self._keys += keys

    @property
    def height(self) -> float:
        """Pixels with all that stands around the axes."""
        return _TOP + self._height + _BOTTOM + len(self._rows_of_keys()) * _KEY_ROW

    def svg(self) -> str:
        """Return the panel's elements, its upper left corner at 0, 0."""
        floor_y, right = _TOP + self._height, self.width - _RIGHT
        parts = [*self._shapes, f"<path d='M{_LEFT} {_TOP}V{floor_y}H{right}' fill='none' stroke='#888'/>"]
        for tick in self._x.ticks():
            x = self._place(tick, self._y.low)[0]
            parts.append(f"<path d='M{x:.1f} {floor_y}v4' stroke='#888'/>")
            parts.append(_text(x, floor_y + 17, f"{tick:,.10g}", anchor="middle"))
        for tick in self._y.ticks():
            y = self._place(self._x.low, tick)[1]
            parts.append(f"<path d='M{_LEFT - 4} {y:.1f}h4' stroke='#888'/>")
            parts.append(_text(_LEFT - 8, y + 4, f"{tick:,.10g}", anchor="end"))
        parts.append(_text((_LEFT + right) / 2, floor_y + 35, self._x.label, anchor="middle"))
        parts.append(_text(4, 16, self._y.label, anchor="start"))
        parts.append(_text((_LEFT + right) / 2, 16, self._title, anchor="middle"))
        for row, keys in enumerate(self._rows_of_keys()):
            left, top = float(_LEFT), floor_y + _BOTTOM + row * _KEY_ROW
            for key in keys:
                parts.append(_sample(key, left, top + 8))
                parts.append(_text(left + 26, top + 12, key.name, anchor="start"))
                left += _key_width(key)
        return "".join(parts)

    def _place(self, x: float, y: float) -> tuple[float, float]:
        left = _LEFT + self._x.share(x) * (self.width - _LEFT - _RIGHT)
        return left, _TOP + (1 - self._y.share(y)) * self._height

    def _rows_of_keys(self) -> list[list[Key]]:
        rows: list[list[Key]] = []
        left = float(self.width)
        for key in self._keys:
            if left + _key_width(key) > self.width - _LEFT:
                rows.append([])
                left = 0.0
            rows[-1].append(key)
            left += _key_width(key)
        return rows


def drawing(panels: Sequence[Panel]) -> str:
    """Return an SVG document of the panels, one below another."""
    parts, top, width = [], 0.0, max(panel.width for panel in panels)
    for panel in panels:
        parts.append(f"<g transform='translate(0 {top:g})'>{panel.svg()}</g>")
        top += panel.height
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {top:g}' {_STYLE}>"
        f"<rect width='{width}' height='{top:g}' fill='#fff'/>{''.join(parts)}</svg>\n"
    )


def _key_width(key: Key) -> float:
    return 48 + 6.6 * len(key.name)


def _sample(key: Key, left: float, middle: float) -> str:
    if key.is_area:
        return f"<rect x='{left}' y='{middle - 6}' width='20' height='12' fill='{key.color}' fill-opacity='0.35'/>"
    dashes = " stroke-dasharray='5 4'" if key.is_dashed else ""
    return f"<path d='M{left} {middle}h20' stroke='{key.color}' stroke-width='1.5'{dashes}/>"


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>" if text else ""
