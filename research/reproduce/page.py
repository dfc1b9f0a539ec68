"""The page of reproductions, written only from a file of results.

<page>.json holds the runs of every trained cell, by the cell's key. <page>.md is made from <page>.json and the claims,
with pictures in images/<page>/. A claim has a section if all its cells have runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import regular_text, replacing
from exogym.core.progress import readable_bytes
from exogym.errors import ArgumentError
from exogym.study.compare.summary import SINGLE
from research.reproduce.catalogue import CLAIMS
from research.reproduce.checks import mean_text
from research.reproduce.claim import Cell, Claim, Found, Run, Seen, Verdict, plain_of, run_of

NO_VERDICT = "too short for a verdict"
HOLDS = {True: "yes", False: "no", None: "seeds disagree"}
ABOUT = """\
We tested papers' claims again in small runs on two cores. Small runs can confirm which method is better. They cannot
confirm absolute numbers. Each section has the paper's finding, our setting and question, and the results as mean ±
standard deviation over seeds. All cells of a section start from the same weights in each seed. We fixed the rules of
each verdict before training; a section says if we changed a rule later. Each rule has a line below the table: "yes"
supports the claim, and "no" contradicts it. We also report claims that fail, and tuned nothing to confirm a claim.

`python -m research reproduce` writes this page from the results in {results}. Each section ends with its
command and the minutes that the command took in one process on a busy machine. To list all claims:

```bash
python -m research reproduce --list
```
"""


class Page:
    """A page of reproductions and its file of results.

    Args:
        path: path of the .md file.
        claims: the claims on the page.
        judges: whether the page gives verdicts. False if the runs are short versions, which decide nothing.

    Raises:
        ArgumentError: the path does not end in .md, or the results cannot be read.
    """

    def __init__(self, path: Path | str, claims: Mapping[str, Claim] = CLAIMS, judges: bool = True) -> None:
        self.path, self.claims, self.judges = Path(path).expanduser(), claims, judges
        if self.path.suffix != ".md":
            raise ArgumentError(f"page={str(path)!r} should end in .md, such as research/results/reproductions.md")
        self.cells: dict[str, dict[str, Any]] = {}
        if self.results.exists():
            try:
                self.cells = json.loads(regular_text(self.results))["cells"]
            except (OSError, ValueError, KeyError) as error:
                raise ArgumentError(
                    f"{self.results} holds no results ({error}): correct or remove this file"
                ) from error

    @property
    def results(self) -> Path:
        """The path of the results file."""
        return self.path.with_suffix(".json")

    def add(self, cell: Cell, runs: Sequence[Run], setting: Mapping[str, Any]) -> None:
        """Add or replace a cell's runs. `setting` holds the options that decided the results of these runs."""
        self.cells[cell.key] = {
            "asked": cell.describe(), "setting": dict(setting), "runs": [plain_of(run) for run in runs],
        }  # fmt: skip

    def found(self, claim: Claim) -> Found | None:
        """Return a claim's runs as a dict by cell label, or None if a cell has no runs."""
        if any(cell.key not in self.cells for cell in claim.cells.values()):
            return None
        return {label: [run_of(x) for x in self.cells[c.key]["runs"]] for label, c in claim.cells.items()}

    def write(self, draw: Sequence[str] | None = None) -> None:
        """Write the results file, the pictures and the page.

        Args:
            draw: names of the claims whose pictures to draw. If `draw` is None, draw the pictures of all claims with
                results.
        """
        from research.reproduce.plots import draw_claim

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.results) as file:
            file.write(results_text(self.cells))
        for name, claim in self.claims.items():
            found = self.found(claim)
            if found is not None and (draw is None or name in draw):
                picture = self.path.parent / self._picture(claim)
                picture.parent.mkdir(parents=True, exist_ok=True)
                draw_claim(claim, found, picture)
        with replacing(self.path) as file:
            file.write(self.text())

    def _picture(self, claim: Claim) -> str:
        return f"images/{self.path.stem}/{claim.name}.png"

    def text(self) -> str:
        """Return the page's text."""
        rows, sections, absent = [], [], []
        for claim in self.claims.values():
            found = self.found(claim)
            if found is None:
                absent.append(f"- {claim.name}: {claim.title} ({claim.paper})")
                continue
            seen = claim.seen(found)
            verdict = str(Verdict.of(seen)) if self.judges else NO_VERDICT
            link = _anchor(f"{claim.name}: {claim.title}")
            rows.append(f"| [{claim.name}](#{link}) | {claim.title} | {verdict} |")
            sections.append(self._section(claim, found, seen, verdict))
        parts = ["# Reproductions\n", ABOUT.format(results=f"[{self.results.name}]({self.results.name})")]
        if rows:
            parts.append("\n".join(["| claim | title | verdict |", "| --- | --- | --- |", *rows]) + "\n")
        parts += sections
        if absent:
            parts.append("## Not run yet\n\nRun `python -m research reproduce` with the name of the claim:\n")
            parts.append("\n".join(absent) + "\n")
        return "\n".join(parts)

    def _section(self, claim: Claim, found: Found, seen: Sequence[Seen], verdict: str) -> str:
        minutes = sum(run.last["wall_s"] for runs in found.values() for run in runs) / 60
        heads = [
            "cell",
            "strategy",
            "task, nodes, steps of batch size, data",
            "validation loss",
            "accuracy",
            "payload/node",
        ]
        lines = [heads, ["---"] * len(heads)]
        for label, runs in found.items():
            cell = claim.cells[label]
            said = _setting_text(self.cells[cell.key]["setting"], cell)
            sent = readable_bytes(_mean(runs, "payload_bytes")) if "payload_bytes" in runs[0].last else ""
            accuracy = _measure(runs, "val_accuracy", "{:.1%}")
            loss = _measure(runs, "val_loss", "{:.4f}")
            lines.append([label, f"`{cell.says}`", said, loss, accuracy, sent])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        checks = "\n".join(f"- {HOLDS[each.holds]}: {each.says}." for each in seen)
        seeds = max(len(runs) for runs in found.values())
        by = f"{seeds} seeds" if seeds > 1 else "1 seed: no spread is known"
        words = claim.name if self.judges else f"{claim.name} --short"
        outcome = f"{checks}\n\n**Verdict on {claim.name}: {verdict}** ({by})."
        if not self.judges:
            outcome = f"**{claim.name}: {verdict}.** The runs work; nothing else follows."
        notes = f"\n{claim.notes}\n" if claim.notes else ""
        return f"""\
## {claim.name}: {claim.title}

{claim.paper}. **The paper:** {claim.found}

**Here:** {claim.asks}

{table}

{outcome}
{notes}
![{claim.title}]({self._picture(claim)})

`python -m research reproduce {words}`: {minutes:.0f} minutes.
"""


def results_text(cells: Mapping[str, Any]) -> str:
    """Return the text of the results file. Each run has its own line, so that changes are readable."""
    blocks = []
    for key, cell in sorted(cells.items()):
        runs = ",\n   ".join(json.dumps(run) for run in cell["runs"])
        head = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(cell[name])}" for name in ("asked", "setting"))
        blocks.append(f' {json.dumps(key)}: {{\n  {head},\n  "runs": [\n   {runs}]}}')
    return '{"cells": {\n' + ",\n".join(blocks) + "}}\n"


def _setting_text(said: Mapping[str, Any], cell: Cell) -> str:
    setting = said["setting"]
    speeds = "" if cell.speeds is None else f", speeds {', '.join(f'{x:g}' for x in cell.speeds)}"
    nodes = f"{'1 of ' if cell.says == SINGLE else ''}N = {setting['nodes']}"
    return f"{cell.task}, {nodes}, {setting['steps']:,} steps of {setting['batch_size']}, {said['partition']}{speeds}"


def _measure(runs: Sequence[Run], name: str, form: str) -> str:
    values = [run.last[name] for run in runs if name in run.last]
    return mean_text(values, form) if values else ""


def _mean(runs: Sequence[Run], name: str) -> float:
    values = [run.last[name] for run in runs if name in run.last]
    return sum(values) / len(values)


def _anchor(heading: str) -> str:
    """Return a heading's anchor for links."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in "_- ")
    return kept.replace(" ", "-")
