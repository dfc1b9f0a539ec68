"""Draw idea.svg (the matrix and its two moves) and parts.svg (what carries a strategy) into this folder.

    python docs/images/diagrams.py

Both pictures are light or dark like the reader's system, and readable at the width of a phone.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
text { font: 16px system-ui, sans-serif; fill: #1b1f23; text-anchor: middle }
.small { font-size: 14px; fill: #57606a }
.left { text-anchor: start }
.back { fill: #ffffff }
.box { fill: #eef4fa; stroke: #0072b2 }
.arrow { stroke: #57606a; stroke-width: 2; fill: none }
.head { fill: #57606a }
.a { fill: #0072b2 } .b { fill: #d55e00 } .c { fill: #009e73 } .d { fill: #cc79a7 } .e { fill: #8a6d3b }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #a8b0b8 } .back { fill: #101418 }
  .box { fill: #16222e; stroke: #56a8e8 } .arrow { stroke: #a8b0b8 } .head { fill: #a8b0b8 }
  .a { fill: #56a8e8 } .b { fill: #ee8a45 } .c { fill: #2fc79a } .d { fill: #dd9ac0 } .e { fill: #c9a86a }
}
"""
WIDTH = 520
NODES, COLUMNS, CELL, GAP = 4, 5, 20, 3


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, *lines: str) -> str:
    """Return a box with a first line of text and smaller ones below it, in its middle."""
    top = y + height / 2 - 10 * (len(lines) - 1) + 5
    words = [text(x + width / 2, top + 20 * k, line, "small" if k else "") for k, line in enumerate(lines)]
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" class="box"/>' + "".join(words)


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a straight arrow to the right, or down."""
    right = to_x > x
    head = f"M {to_x} {to_y} l -9 -5 v 10 z" if right else f"M {to_x} {to_y} l -5 -9 h 10 z"
    line = f"M {x} {y} L {to_x - 8 * right} {to_y - 8 * (not right)}"
    return f'<path d="{line}" class="arrow"/><path d="{head}" class="head"/>'


def matrix(x: float, y: float, colors: str, alike: bool = True, shift: int = 0) -> str:
    """Return four rows of cells. `colors` has a class for each row. Rows with equal shades hold equal numbers."""
    cells = [
        f'<rect x="{x + column * (CELL + GAP)}" y="{y + row * (CELL + GAP)}" width="{CELL}" height="{CELL}" rx="3"'
        f' class="{colors[row]}" opacity="{0.4 + 0.15 * ((column * (2 + shift if alike else row + 2) + shift) % 4)}"/>'
        for row in range(NODES)
        for column in range(COLUMNS)
    ]
    return "".join(cells)


def picture(name: str, height: float, label: str, *parts: str) -> None:
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    back = f'<rect width="{WIDTH}" height="{height}" class="back"/>'
    (HERE / name).write_text("\n".join([opening, f"<style>{STYLE}</style>", back, *parts, "</svg>", ""]))


def idea() -> None:
    wide = COLUMNS * (CELL + GAP) - GAP
    first, second, third = 62, 232, 402
    names = [text(30, 76 + row * (CELL + GAP), f"node {row}", "small") for row in range(NODES)]
    picture(
        "idea.svg", 232, "All nodes are one matrix. Local training changes each row. Communication mixes the rows.",
        *names,
        text(first + wide / 2, 40, "X: a row per node"), matrix(first, 60, "eeee"),
        arrow(first + wide + 8, 104, second - 8, 104),
        text(second + wide / 2, 40, "rows differ"), matrix(second, 60, "abcd", alike=False),
        arrow(second + wide + 8, 104, third - 8, 104),
        text(third + wide / 2, 40, "rows equal"), matrix(third, 60, "eeee", shift=1),
        text((first + second + wide) / 2, 178, "1. Local training"),
        text((first + second + wide) / 2, 198, "changes each row.", "small"),
        text((second + third + wide) / 2, 178, "2. Communication"),
        text((second + third + wide) / 2, 198, "mixes the rows.", "small"),
        text(WIDTH / 2, 223, "X ← W (X − ηG)", "small"),
    )  # fmt: skip


def parts() -> None:
    picture(
        "parts.svg", 330, "One strategy runs in one process, in several processes and on several computers.",
        box(130, 12, 260, 60, "a strategy", "DiLoCo, SPARTA, yours: one file"),
        arrow(260, 74, 260, 104),
        box(130, 106, 260, 60, "the communicator", "mixes rows, counts every byte"),
        arrow(95, 196, 95, 226), arrow(260, 168, 260, 226), arrow(425, 196, 425, 226),
        '<path d="M 95 196 H 425" class="arrow"/>',
        box(12, 228, 160, 62, "one process", "all rows"),
        box(180, 228, 160, 62, "some processes", "some rows each"),
        box(348, 228, 160, 62, "real machines", "a row or more each"),
        text(WIDTH / 2, 316, "The same bits in all three. A clock predicts the time on a network.", "small"),
    )  # fmt: skip


if __name__ == "__main__":
    idea()
    parts()
