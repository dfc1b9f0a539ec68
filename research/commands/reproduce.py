"""`python -m research reproduce`: test claims of papers in small runs, and write a page with the results."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exogym.cli.values import INTERRUPTED, Debug, processes_of
from exogym.core.progress import notice
from exogym.errors import ArgumentError, DataError, ExoGymError
from exogym.network import readable_seconds
from research.reproduce import CLAIMS, Claim, Verdict, claims_of
from research.reproduce.claim import SEEDS

if TYPE_CHECKING:
    from research.reproduce import Page, Reproduction
    from research.reproduce.training import CellProgress

SELDOM_S = 30.0  # between lines, as a run's own progress
SHORT_SHARE = 0.05  # share of the steps
PAGE = "reproductions.md"

# Options of all commands that train cells and write a page
PAGE_HELP = "Page to write (.md). Its results go beside it as .json. [default: DIR/{}]"
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the runs. Its finished runs are kept.")]
OnlyPage = Annotated[bool, typer.Option("--only-page", help="Train nothing; write the page from the saved results.")]
Short = Annotated[
    bool, typer.Option("--short", help="One seed and a twentieth of the steps. Shows only that everything runs.")
]
Processes = Annotated[str, typer.Option(metavar="P", help="Processes that share the nodes, or auto.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]


def reproduce(
    claims: Annotated[
        list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Claims to test, as R1; see --list. [default: all]")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the claims and exit.")] = False,
    out: Out = Path("runs/reproductions"),
    page: Annotated[Path | None, typer.Option(metavar="FILE", help=PAGE_HELP.format(PAGE))] = None,
    only_page: OnlyPage = False,
    short: Short = False,
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=1, help="Test the central claims at three model sizes, with K trials to tune each cell."
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(metavar="H", min=0, help="Stop after this time; only with --trials.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder of the data. [default: the usual places]")
    ] = None,
    processes: Processes = "1",
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Test claims of papers in small runs with three seeds, and write which claims hold.

    The command first prints the number of runs and how long they will take. Each finished run is saved. If several
    claims need the same run, it is trained once. After Ctrl-C the same command continues and trains no finished run
    again.

    With --trials, the command tests the central claims at three model sizes with tuned rates instead. Then --processes
    is the number of runs that train at the same time.
    """
    if listed:
        for claim in CLAIMS.values():
            print(f"{claim.name:<24}{claim.title}")
        return
    if trials is not None:
        from research.commands import atlas

        if short:
            raise ArgumentError("--short does not go with --trials: leave one of them out")
        asked = processes_of(processes)
        atlas.claims_at_sizes(trials, claims or [], hours, out, page, only_page, asked, device, data)
        return
    if hours is not None:
        raise ArgumentError("--hours needs --trials")
    from research.reproduce import Page, Reproduction
    from research.reproduce.training import different

    chosen = claims_of(claims or [])
    if page is None:
        page = out / ("short.md" if short else PAGE)
    elif short:
        raise ArgumentError("--short proves nothing about a claim, so it writes no --page: leave out --short or --page")
    written = Page(page, judges=not short)
    if only_page:
        written.write()
        print(f"written: {page}")
        return
    work = Reproduction(
        out, seeds=SEEDS[:1] if short else SEEDS, share=SHORT_SHARE if short else 1.0, data=data,
        processes=processes_of(processes), device=device, watch=Teller(),
    )  # fmt: skip
    chosen = _possible(work, chosen, bool(claims))
    cells = different(cell for claim in chosen for cell in claim.cells.values())
    left = sum(len(work.missing(cell)) for cell in cells)
    runs = len(cells) * len(work.seeds)
    if left:
        span = readable_seconds(work.seconds_left(cells))
        notice(f"{len(chosen)} claims: {left} of {runs} runs left to train, about {span} in one process")
    for claim in chosen:
        try:
            work.train([claim], of=chosen)
        except KeyboardInterrupt:
            again = " ".join([*(claims or []), *(["--short"] if short else []), "--out", str(out)])
            notice(f"to continue: python -m research reproduce {again}")
            raise typer.Exit(INTERRUPTED) from None
        except ExoGymError as error:
            if claims:
                raise
            notice(f"left out: claim {claim.name}: {error}")
            continue
        for cell in claim.cells.values():
            written.add(cell, work.results(cell), work.asked(cell))
        written.write(draw=[claim.name])
        _say(claim, written)
    print(f"written: {page}")


def _possible(work: Reproduction, claims: list[Claim], named: bool) -> list[Claim]:
    """Return the claims that can be trained. Raise if the user named a claim that cannot."""
    possible = []
    for claim in claims:
        try:
            work.check([claim])
            possible.append(claim)
        except (ArgumentError, DataError) as error:
            if named:
                raise
            notice(f"left out: {error}")
    return possible


def _say(claim: Claim, page: Page) -> None:
    from research.reproduce.page import NO_VERDICT

    found = page.found(claim)
    assert found is not None
    seen = claim.seen(found)
    if not page.judges:
        print(f"{claim.name} has run, {NO_VERDICT}: {claim.title}")
        return
    print(f"{claim.name} {Verdict.of(seen)}: {claim.title}")
    for each in seen:
        print(f"  {'yes' if each.holds else 'no' if each.holds is False else 'unclear'}: {each.says}")
    sys.stdout.flush()


class Teller:
    """Prints a line of progress for each finished run, and every 30 seconds."""

    def __init__(self) -> None:
        self.due = time.perf_counter() + SELDOM_S

    def __call__(self, at: CellProgress) -> None:
        if at.run_ended or time.perf_counter() > self.due:
            here, left = at.standing, f"{at.runs_left} runs left, about {readable_seconds(at.left_s)}"
            where = "" if at.run_ended else f" at step {here.step} of {here.steps}"
            notice(f"{at.cell.says}, {at.cell.task}, seed {at.seed}{where}: loss {here.val_loss:.4f}; {left}")
            self.due = time.perf_counter() + SELDOM_S
