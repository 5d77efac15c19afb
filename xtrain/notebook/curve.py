"""The curve of a loss as SVG: text with numbers in it, a few kilobytes at any number of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

POINTS = 240  # of a line, at most
_LARGEST = 1e300
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 220, 58, 12, 12, 32
_LINE, _MARK = "#4c86c6", "#c44e1b"  # both can be read on white and on black


class Series:
    """Values by step, in at most 2 * POINTS buckets: neighbours are joined to their means as more come. A value that is
    not finite is left out.
    """

    def __init__(self) -> None:
        self._buckets: list[tuple[float, float, int]] = []  # sums of steps and of values, count
        self._each = 1

    def add(self, step: int, value: float) -> None:
        """Take a value; steps come in order."""
        if not math.isfinite(value):
            return
        if self._buckets and self._buckets[-1][2] < self._each:
            steps, values, count = self._buckets[-1]
            self._buckets[-1] = (steps + step, values + value, count + 1)
            return
        if len(self._buckets) == 2 * POINTS:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [(a + c, b + d, m + n) for (a, b, m), (c, d, n) in pairs]
            self._each *= 2
        self._buckets.append((float(step), float(value), 1))

    def points(self) -> list[tuple[float, float]]:
        """At most POINTS (mean step, mean value)."""
        group = math.ceil(len(self._buckets) / POINTS) or 1
        found = []
        for i in range(0, len(self._buckets), group):
            part = self._buckets[i : i + group]
            count = sum(n for _, _, n in part)
            found.append((sum(s for s, _, _ in part) / count, sum(v for _, v, _ in part) / count))
        return found


def _fits(value: float) -> bool:
    """Whether a value can stand in a picture: sums and differences of two such are finite."""
    return abs(value) <= _LARGEST


def svg(line: Sequence[tuple[float, float]], marks: Iterable[tuple[float, float]] = (), unit: str = "loss") -> str:
    """A picture of (step, value): a line, and marks joined by another; empty where there is nothing finite.
    What is not finite, or is beyond 1e300, is left out.

    unit: what the values are, for the text that readers of the screen get and the upper left corner.
    """
    line = [point for point in line if all(map(_fits, point))]
    marks = [point for point in marks if all(map(_fits, point))][-POINTS:]
    every = [*line, *marks]
    if not every:
        return ""
    steps, values = [x for x, _ in every], [y for _, y in every]
    x0, x1, y0, y1 = min(steps), max(steps), min(values), max(values)
    if x0 == x1:
        x0, x1 = x0 - 1, x1 + 1
    margin = 0.05 * (y1 - y0) if y0 < y1 else max(0.5, 0.05 * abs(y0))
    low, high = y0 - margin, y1 + margin

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + (point[0] - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - point[1]) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    def path(points: Iterable[tuple[float, float]], colour: str, width: float) -> str:
        text = " ".join(f"{x:g},{y:g}" for x, y in map(place, points))
        return f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(unit)} by step" style="max-width:100%" '
        'font-family="sans-serif" font-size="11" fill="currentColor">'
    ]
    for value in _ticks(low, high, 4):
        _, y = place((x0, value))
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}" stroke="currentColor" opacity="0.15"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{value:.6g}</text>'
        )
    for step in _ticks(x0, x1, 5):
        x, _ = place((step, low))
        parts.append(f'<text x="{x:g}" y="{_HEIGHT - 16}" text-anchor="middle">{step:.12g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{_HEIGHT - 3}" text-anchor="middle">step</text>')
    if line:
        parts.append(path(line, _LINE, 1.5) if len(line) > 1 else _dot(place(line[0]), _LINE))
    if marks:
        parts.append(path(marks, _MARK, 1) + "".join(_dot(place(point), _MARK) for point in marks))
    names = [(unit, _LINE)] if line else []
    names += [("validation", _MARK)] if marks else []
    for i, (name, colour) in enumerate(reversed(names)):
        parts.append(
            f'<text x="{_WIDTH - _RIGHT - 4}" y="{_TOP + 12 + 15 * (len(names) - 1 - i)}" text-anchor="end" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _dot(place: tuple[float, float], colour: str) -> str:
    return f'<circle cx="{place[0]:g}" cy="{place[1]:g}" r="2.5" fill="{colour}"/>'


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    size = next(power * m for m in (1, 2, 5, 10, 20) if power * m >= raw)
    first = math.ceil(low / size)
    found = [(first + i) * size for i in range(2 * count + 2)]
    return [0.0 if abs(value) < size / 2 else value for value in found if low <= value <= high]
