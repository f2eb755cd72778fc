"""The pictures of the walkthrough: as SVG, and as lines of text.

Each is a NamedTuple with `svg()` and `lines(width)`, the latter empty where the table
beside it says the same.
"""

import html
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlm_jax.explaining import words

WIDTH = 400
INK, DIM, LINE, BLUE, ORANGE, GREEN = (
    *("#1b2733", "#5b6775", "#d9dfe6"),
    *("#1f4e8c", "#c2410c", "#15803d"),
)
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1b2733}.s{font-size:12px;fill:#5b6775}"
    ".b{font-weight:600}.e{text-anchor:end}.m{text-anchor:middle}.w{fill:#fff}"
)
LETTER = 8.2  # the widest that a letter of a word is on average, at 14 px
BAR_CHARACTERS = 30


class Boxes(NamedTuple):
    """Rows of boxes: words, what stands above and below each, which are hidden."""

    rows: list[list["Box"]]
    labels: list[str] = []

    def svg(self):
        y, parts = 0.0, []
        for i, row in enumerate(self.rows):
            if self.labels:
                parts.append(_text(2, y + 14, self.labels[i], "s"))
                y += 20
            made, y = _box_row(row, y)
            parts += made
            y += 8
        return _picture(parts, y)

    def lines(self, width):
        for i, row in enumerate(self.rows):
            if self.labels:
                yield f"{self.labels[i]}:"
            yield from _wrapped([box.line() for box in row], width)


class Box(NamedTuple):
    word: str
    below: str = ""
    kind: str = ""  # hidden, changed, or nothing

    def line(self):
        edges = {"hidden": "⟦⟧", "changed": "‹›"}.get(self.kind, "[]")
        word = self.word.strip("[]") if self.kind == "" else self.word
        below = f" {self.below}" if self.below else ""
        return f"{edges[0]}{word}{below}{edges[1]}"

    def width(self):
        return max(len(self.word), len(self.below)) * LETTER + 18


FILLS = {
    "": ("#fff", "#9aa5b1", ""),
    "hidden": (BLUE, BLUE, " w"),
    "changed": ("#ffedd5", ORANGE, ""),
}


def _box_row(row, y):
    """Returns the parts of boxes that wrap, and where they end."""
    parts, x = [], 1.0
    height = 46 if any(box.below for box in row) else 30
    for box in row:
        wide = min(box.width(), WIDTH - 2)
        if x + wide > WIDTH:
            x, y = 1.0, y + height + 6
        fill, edge, ink = FILLS[box.kind]
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{wide:.1f}" '
            f'height="{height - 2}" rx="6" fill="{fill}" stroke="{edge}" '
            'stroke-width="1.5"/>'
        )
        parts.append(_text(x + wide / 2, y + 20, box.word, f"m b{ink}"))
        if box.below:
            parts.append(_text(x + wide / 2, y + 38, box.below, f"m s{ink}"))
        x += wide + 6
    return parts, y + height


class Strips(NamedTuple):
    """Vectors, a row each: the first numbers as colours, and as figures if few."""

    labels: list[str]
    vectors: list[np.ndarray]
    most: int = 24

    def svg(self):
        shown = [np.asarray(v)[: self.most] for v in self.vectors]
        top = max(max(np.abs(v).max() for v in shown), 1e-12)
        parts, left = [], 96
        size = (WIDTH - left) / max(map(len, shown))
        for i, (label, vector) in enumerate(zip(self.labels, shown, strict=True)):
            y = 26 * i
            parts.append(_text(left - 8, y + 18, _short(label, 11), "e"))
            for k, x in enumerate(vector):
                parts.append(
                    f'<rect x="{left + k * size:.1f}" y="{y + 2}" width="{size:.1f}" '
                    f'height="22" fill="{_shade(x / top)}" stroke="#fff"/>'
                )
                if len(vector) <= 4:
                    middle = left + (k + 0.5) * size
                    parts.append(_text(middle, y + 18, words.number(x), "m"))
        return _picture(parts, 26 * len(shown))

    def lines(self, width):
        for label, vector in zip(self.labels, self.vectors, strict=True):
            figures = [f"{x:.2f}".replace("-", "−") for x in vector[:6]]
            more = f" … ({len(vector)} numbers)" if len(vector) > 6 else ""
            yield f"{_short(label, 12):>12}  ({', '.join(figures)}{more})"


class Bars(NamedTuple):
    """A bar for each label, with its figure beside it."""

    labels: list[str]
    values: list[float]
    figures: list[str]
    marked: int = -1  # the bar of another colour

    def svg(self):
        parts, left, room = [], 96, 200
        low, high = min(0, *self.values), max(0, *self.values)
        scale = room / max(high - low, 1e-12)
        zero = left - low * scale
        for i, (label, value) in enumerate(zip(self.labels, self.values, strict=True)):
            y, wide = 28 * i, abs(value) * scale
            x = zero - wide if value < 0 else zero
            fill = ORANGE if i == self.marked else BLUE
            parts.append(_text(left - 8, y + 19, _short(label, 11), "e"))
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{max(wide, 0.8):.1f}" '
                f'height="20" fill="{fill}"/>'
            )
            parts.append(_text(max(x + wide, zero) + 6, y + 19, self.figures[i]))
        return _picture(parts, 28 * len(self.labels))

    def lines(self, width):
        top = max(max(map(abs, self.values)), 1e-12)
        for label, value, figure in zip(
            self.labels, self.values, self.figures, strict=True
        ):
            bar = "█" * round(BAR_CHARACTERS * abs(value) / top)
            yield f"{_short(label, 16):>16}  {bar or '▏'} {figure}"


class Whole(NamedTuple):
    """Shares of one bar, whose length is one."""

    rows: list[tuple[str, list[tuple[str, float, str]]]]  # (title, (label, part, text))

    def svg(self):
        y, parts = 0, []
        for title, shares in self.rows:
            if title:
                parts.append(_text(0, y + 15, title, "b"))
                y += 22
            x = 0.0
            for i, (_, part, _) in enumerate(shares):
                fill = _part_color(i)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{part * WIDTH:.2f}" height="30" '
                    f'fill="{fill}" stroke="#fff" stroke-width="1"/>'
                )
                x += part * WIDTH
            y += 36
            x = 0.0
            for i, (label, _, figure) in enumerate(shares):
                label = f"{_short(label, 14)} {figure}"
                wide = len(label) * 7.4 + 28
                if x and x + wide > WIDTH:
                    x, y = 0.0, y + 22
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="12" height="12" '
                    f'fill="{_part_color(i)}"/>'
                )
                parts.append(_text(x + 17, y + 14, label))
                x += wide
            y += 34
        return _picture(parts, y - 10)

    def lines(self, width):
        for title, shares in self.rows:
            listed = "  ".join(f"{label} {figure}" for label, _, figure in shares)
            yield f"{title}: {listed}" if title else listed


def _part_color(i):
    colors = (BLUE, ORANGE, GREEN, "#7c3aed", "#b45309", "#0e7490")
    return colors[i % len(colors)]


class Curve(NamedTuple):
    """A function, and points on it with their labels."""

    function: Callable[[float], float]
    points: list[tuple[float, str]]
    low: float
    high: float
    across: str
    up: str
    top: float

    def svg(self):
        left, right, floor, ceiling = 44, WIDTH - 14, 214, 24
        fine = np.linspace(self.low, self.high, 240)
        y_K = np.array([self.function(x) for x in fine])

        def place(x, y):
            across = left + (right - left) * (x - self.low) / (self.high - self.low)
            return across, floor - (floor - ceiling) * min(y / self.top, 1.03)

        inside = y_K <= self.top * 1.02
        path = " ".join(
            f"{a:.1f},{b:.1f}"
            for a, b in (place(x, y) for x, y in zip(fine[inside], y_K[inside]))  # noqa: B905
        )
        parts = [
            f'<path d="M{left} {ceiling}V{floor}H{right}" fill="none" stroke="{DIM}"/>',
            f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2"/>',
            _text((left + right) / 2, floor + 34, self.across, "m s"),
            _text(4, 14, self.up, "s"),
        ]
        for x in (self.low, (self.low + self.high) / 2, self.high):
            parts.append(_text(place(x, 0)[0], floor + 17, f"{x:g}", "m s"))
        for y in (0, self.top / 2, self.top):
            parts.append(_text(left - 6, place(0, y)[1] + 4, f"{y:.3g}", "e s"))
        used: list = []
        rises = y_K[-1] > y_K[0]
        for x, label in self.points:
            y = self.function(x)
            if not (self.low <= x <= self.high and y <= self.top):
                continue
            a, b = place(x, y)
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4.5" fill="{ORANGE}"/>')
            b -= 10
            while any(abs(b - other) < 15 and abs(a - at) < 90 for at, other in used):
                b -= 15
            used.append((a, b))
            # Off the curve, on its outer side, where there is room.
            is_left = a > (150 if rises else 320)
            a += -8 if is_left else 9
            parts.append(_text(a, b, _short(label, 18), "e" if is_left else ""))
        return _picture(parts, floor + 42)

    def lines(self, width):
        return ()


class Arrows(NamedTuple):
    """Vectors of two numbers from one origin; the first is drawn thicker."""

    labels: list[str]
    vectors: list[np.ndarray]

    def svg(self):
        corners = np.array([*self.vectors, (0, 0)])
        low, high = corners.min(0) - 0.6, corners.max(0) + 0.6
        unit = min((WIDTH - 90) / (high - low)[0], 230 / (high - low)[1])
        height = unit * (high - low)[1]

        def place(vector):
            x = 20 + unit * (vector[0] - low[0])
            return x, height - unit * (vector[1] - low[1])

        (x0, y0), parts = place((0, 0)), []
        parts.append(
            f'<path d="M0 {y0:.1f}H{WIDTH}M{x0:.1f} 0V{height:.1f}" stroke="{LINE}"/>'
        )
        for i, (label, vector) in enumerate(
            zip(self.labels, self.vectors, strict=True)
        ):
            x, y = place(vector)
            color, wide = (ORANGE, 4) if i == 0 else (BLUE, 2.5)
            angle = math.degrees(math.atan2(y - y0, x - x0))
            parts.append(
                f'<path d="M{x0:.1f} {y0:.1f}L{x:.1f} {y:.1f}" stroke="{color}" '
                f'stroke-width="{wide}"/><path d="M0 0L-12 -6L-12 6Z" fill="{color}" '
                f'transform="translate({x:.1f} {y:.1f}) rotate({angle:.1f})"/>'
            )
            at = f"{label} ({', '.join(words.number(v) for v in vector)})"
            parts.append(_text(min(x + 8, WIDTH - 8 * len(at)), y - 8, at))
        return _picture(parts, height)

    def lines(self, width):
        return ()


class Flow(NamedTuple):
    """Everything in one picture: stages from above to below, an arrow between two."""

    stages: list[tuple[str, "Drawing"]]

    def svg(self):
        y, parts = 0.0, []
        for i, (title, picture) in enumerate(self.stages):
            if i:
                parts.append(
                    f'<path d="M200 {y:.1f}v18m-6 -8l6 8l6 -8" fill="none" '
                    f'stroke="{DIM}" stroke-width="2"/>'
                )
                y += 26
            parts.append(_text(0, y + 14, title, "s"))
            inner = picture.svg()
            height = float(inner.split('viewBox="0 0 400 ', 1)[1].split('"', 1)[0])
            body = inner.split("</style>", 1)[1].removesuffix("</svg>")
            parts.append(f'<g transform="translate(0 {y + 22:.1f})">{body}</g>')
            y += 22 + height + 8
        return _picture(parts, y)

    def lines(self, width):
        for i, (title, picture) in enumerate(self.stages):
            if i:
                yield "        ↓"
            yield f"{title}:"
            yield from (f"  {line}" for line in picture.lines(width - 2))


Drawing = Boxes | Strips | Bars | Whole | Curve | Arrows | Flow


def _picture(parts, height):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 {height:.1f}" '
        f'width="400" height="{height:.1f}"><style>{STYLE}</style>'
        f"{''.join(parts)}</svg>"
    )


def _text(x, y, text, kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(text)}</text>'


def _short(text, most):
    return text if len(text) <= most else text[: most - 1] + "…"


def _shade(x):
    """From orange over white to blue, for -1 to 1."""
    end = np.array([37, 99, 180]) if x > 0 else np.array([217, 105, 40])
    red, green, blue = np.rint(255 + (end - 255) * min(abs(float(x)), 1) * 0.75)
    return f"rgb({red:.0f},{green:.0f},{blue:.0f})"


def _wrapped(items, width):
    line = ""
    for item in items:
        if line and len(line) + 1 + len(item) > width:
            yield line
            line = ""
        line += f" {item}" if line else item
    yield line
