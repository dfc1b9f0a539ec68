"""Leave one publication out: are its losses predicted from the others, as `exogym advise` predicts steps?

    python -m research.left_out

Each of DiLoCo's cells in `exogym/study/advise/published.csv` becomes a question that `at_scale` answers from the other
publications. A multiple m of DDP's steps predicts the loss ratio m^s, with the slope s of
`exogym.study.advise.published`. The error is the predicted over the measured ratio, minus 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from exogym.study.advise.beliefs import Belief, h_of, without_h
from exogym.study.advise.published import Cell, at_scale, cells, slope

CLOSE = 0.01  # the error up to which a prediction counts as right
STEPS = 10**5  # so many that every method arrives
THUMB = Belief(0.0, 0.0, 0.0)  # of our own tasks, which are too far away to count


def errors() -> Iterator[tuple[Cell, float]]:
    """Yield each of DiLoCo's cells with its prediction's error."""
    for cell in cells():
        if without_h(cell.strategy) == "diloco":
            H = int(h_of(cell.strategy) or 1)
            belief, _ = at_scale(THUMB, cell.strategy, H, STEPS, cell.parameters, cell.nodes, without=cell.source)
            yield cell, belief.steps ** slope(cell.parameters, cell.tokens) / cell.loss_ratio - 1


def table(found: Iterable[tuple[Cell, float]]) -> str:
    """Return a table in Markdown with a row for each publication, and one for all."""
    rows: dict[str, list[float]] = {}
    for cell, error in found:
        name = f"arXiv:{cell.source}" + (f", {cell.but}" if cell.but else "")
        rows.setdefault(name, []).append(abs(error))
    rows["all"] = [error for each in rows.values() for error in each]
    lines = ["| left out | cells | within 1 % | median error | largest |", "| --- | --- | --- | --- | --- |"]
    for name, each in rows.items():
        right = sum(error <= CLOSE for error in each)
        lines.append(f"| {name} | {len(each)} | {right} | {median(each):.2%} | {max(each):.1%} |".replace("%", " %"))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(errors()))
