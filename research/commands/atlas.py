"""`research benchmark --trials K`: tune every method alike, and write a page. `benchmark add` merges results."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from exogym.cli.values import INTERRUPTED, numbers_of
from exogym.core.progress import notice
from exogym.errors import ArgumentError, DataError, check_choice, needs
from exogym.network import readable_seconds
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.study.compare.entries import split_strategies
from research.atlas.claims import CENTRAL, SIZES, studies_at
from research.atlas.claims_page import write as write_claims
from research.atlas.equal import METHODS, studies_at_rates
from research.atlas.findings import Asked, findings_of
from research.atlas.gaps import CLAIM as GAP_CLAIM
from research.atlas.gaps import gap_studies
from research.atlas.page import write
from research.atlas.places import KINDS, PLACES, VARIANTS, Place, studies_of
from research.atlas.table import FRESH, Row, Table
from research.atlas.training import Atlas, Ended, Study, TimeIsUp

PAGE, CLAIMS_PAGE = "atlas.md", "claims.md"
ONLY_TRIALS = ("steps", "hours")
TUNED = ("tuned", "default")


def check_options(trials: int | None, **given: object) -> None:
    """Check which options go with --trials. `given` has the options' values by name.

    Raises:
        ArgumentError: an option is given that only the other kind of benchmark has.
    """
    for name, value in given.items():
        is_given = value is not None and value is not False  # 0 hours are given, too
        if is_given and (name in ONLY_TRIALS) != (trials is not None):
            raise ArgumentError(f"--{name} {'needs' if trials is None else 'does not go with'} --trials")


def train(
    trials: int,
    tasks: str | None,
    nodes: str | None,
    strategies: str | None,
    steps: int | None,
    hours: float | None,
    out: Path,
    page: Path | None,
    only_page: bool,
    processes: int | str,
    device: str,
) -> None:
    """Train the missing runs, write the table after each method, and write the page."""
    needs("matplotlib", "demo")
    page = _page(page or out / PAGE)
    table = _table(page)
    if only_page:
        _write_page(table, page)
        return
    places = _places(tasks, nodes)
    for method in () if strategies is None else split_strategies(strategies):
        parse_strategy(method)  # a misspelt name is an error, not a method to leave out
    methods = (*sorted(STRATEGIES), *VARIANTS) if strategies is None else tuple(split_strategies(strategies))
    studies = studies_of(places, methods, steps)
    if not studies:
        raise ArgumentError(f"none of the strategies {', '.join(methods)} has a server that asks clients")
    atlas = Atlas(
        out, studies, trials=trials, processes=processes, device=device, hours=hours,
        watch=_tell,
    )  # fmt: skip
    if _trained(atlas, table) or table.rows:
        _write_page(table, page)


def _trained(atlas: Atlas, table: Table) -> bool:
    """Train what is left, and write the table after each study. Return False if the time is up.

    Raises:
        typer.Exit: the user pressed Ctrl-C.
    """
    for one in {study.place: study for study in atlas.studies}.values():
        table.check(one.place, atlas.place_of(one))
    for study, why in atlas.left_out.items():
        notice(f"left out: {study}: {why}")
        table.left_out[study] = why
    asked = len(atlas.studies)
    atlas.know(table)
    if asked > len(atlas.studies):
        notice(f"{asked - len(atlas.studies)} of {asked} studies are in {table.path}: not trained again")
    left = atlas.runs_left()
    if left:
        notice(f"about {left} runs left to train, about {readable_seconds(atlas.seconds_left())}")

    def ended(study: Study) -> None:
        table.put(atlas.place_of(study), atlas.rows(study))
        table.write()

    try:
        atlas.train(ended)
    except (KeyboardInterrupt, TimeIsUp) as end:
        _stopped(end, f"about {atlas.runs_left()} runs left. ")
        return False
    return True


def _stopped(end: BaseException, left: str = "") -> None:
    notice(f"{left}To continue: {shlex.join(['exogym', *sys.argv[1:]])}")
    if isinstance(end, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED) from None


def claims_at_sizes(
    trials: int, claims: Sequence[str], hours: float | None, out: Path, page: Path | None, only_page: bool,
    processes: int | str, device: str, data: str | None,
) -> None:  # fmt: skip
    """Train the claims' missing cells at all sizes, and write the page of verdicts."""
    page = _page(page or out / CLAIMS_PAGE)
    table = _table(page, claims=True)
    for name in claims:
        check_choice("claim", name, CENTRAL)
    if only_page:
        _say_claims(table, page, claims)
        return
    wanted = [central for name, central in CENTRAL.items() if not claims or name in claims]
    studies = [study for size in SIZES for central in wanted for study in studies_at(central, size).values()]
    studies += gap_studies() if any(central.name == GAP_CLAIM for central in wanted) else []
    files = {study.cell.task: data for study in studies} if data is not None else None
    atlas = Atlas(
        out, list(dict.fromkeys(studies)), trials=trials, processes=processes, device=device, hours=hours, watch=_tell,
        data=files, defaults=False,
    )  # fmt: skip
    if _trained(atlas, table):
        _say_claims(table, page, claims)


def _say_claims(table: Table, page: Path, claims: Sequence[str]) -> None:
    """Write the page of verdicts, and print each."""
    for name, each in write_claims(table, page, claims).items():
        print(f"{name} {each.outcome}: {each.central.claim.title}")
    print(f"written: {page}")


def confirm(page: Path, out: Path, hours: float | None, processes: int | str, device: str) -> None:
    """Train the findings of a page's table again with fresh seeds, and write the page again."""
    needs("matplotlib", "demo")
    page = _page(page)
    table = _table(page)
    asked = sorted({each for finding in findings_of(table) for each in finding.asks})
    if not asked:
        raise ArgumentError(f"{table.path} has no findings: wanted ddp and another method with tuned settings")
    again = [(row["place"], row["method"], row["kind"]) for row in table.rows]
    there = {each for each in asked if again.count((*each[:2], f"{each[2]} again")) == len(FRESH)}
    if there:
        print(f"{len(there)} of {len(asked)} settings are in {table.path}: not trained again")
        asked = [each for each in asked if each not in there]
    rows = _fresh(table, asked, out, hours, processes, device) if asked else []
    if rows is None:
        return
    for name in {name for name, _, _ in asked}:
        table.put(table.places[name], [row for row in rows if row["place"] == name])
    table.write()
    _write_page(table, page)


def rates(page: Path, out: Path, hours: float | None, processes: int | str, device: str) -> None:
    """Train methods of a page's table at two inner rates that they share, and write the page again."""
    needs("matplotlib", "demo")
    page = _page(page)
    table = _table(page)
    studies: dict[int, list[Study]] = {}  # by the number of trials
    for name, about in table.places.items():
        try:
            studies.setdefault(about["trials"], []).extend(studies_at_rates(table, name))
        except DataError as error:
            notice(f"left out: {name}: {error}")
    if not any(studies.values()):
        raise ArgumentError(f"{table.path} has no place with ddp and another of {', '.join(METHODS)}: train them first")
    until = None if hours is None else time.monotonic() + 3600 * hours
    for trials, each in studies.items():
        left = None if until is None else max(0.0, until - time.monotonic()) / 3600
        if each and not _trained(
            Atlas(out, each, trials=trials, processes=processes, device=device, hours=left, watch=_tell), table
        ):
            break
    _write_page(table, page)


def _fresh(
    table: Table, asked: Sequence[Asked], out: Path, hours: float | None, processes: int | str, device: str
) -> list[Row] | None:
    """Train settings of a table with fresh seeds, and return their rows; None if the time is up or the user stopped."""
    options = {
        (row["place"], row["method"], row["kind"]): row["options"] for row in table.rows if row["kind"] in TUNED
    }  # fmt: skip
    studies = {}
    for name, method, _ in asked:
        kind, _, nodes = name.rpartition("-")
        (studies[name, method],) = studies_of([Place(kind, int(nodes))], [method], table.places[name]["steps"])
    atlas = Atlas(
        out, list(studies.values()), trials=1, processes=processes, device=device, hours=hours, watch=_tell,
    )  # fmt: skip
    try:
        return atlas.train_again([
            (studies[name, method], kind, options[name, method, kind]) for name, method, kind in asked
        ])  # fmt: skip
    except (KeyboardInterrupt, TimeIsUp) as end:
        _stopped(end)
        return None


def add(files: Sequence[Path], page: Path) -> None:
    """Merge the results of other runs into a page's table, and write the page again."""
    page = _page(page)
    table = _table(page)
    for file in files:
        print(f"{file}: {table.add(file)} new results")
        check_places(table, file)
    table.write()
    _write_page(table, page)


def _page(page: Path) -> Path:
    if page.suffix != ".md":
        raise ArgumentError(f"--page={str(page)!r} should end in .md, as docs/{PAGE}")
    return page


def _table(page: Path, claims: bool = False) -> Table:
    """Open the table beside a page of the atlas, or beside a page of claims."""
    table = Table(page.with_suffix(".json"))
    check_places(table, table.path, claims)
    return table


def check_places(table: Table, file: Path, claims: bool = False) -> None:
    """Check that a table has results of the atlas's places, or of claims.

    Raises:
        ArgumentError: the table has the other kind of results.
    """
    for place, about in table.places.items():
        if claims == (place in {f"{kind}-{about['nodes']}" for kind in KINDS}):
            wanted = "reproduce" if claims else "benchmark"
            raise ArgumentError(
                f"{file} has results of {place!r}: wanted results of python -m research {wanted} --trials"
            )


def _write_page(table: Table, page: Path) -> None:
    if not table.rows:
        raise ArgumentError(f"{table.path} has no results: train first, without --only-page")
    write(table, page)
    print(f"written: {page}")


def _places(tasks: str | None, nodes: str | None) -> list[Place]:
    if tasks is None and nodes is None:
        return list(PLACES)
    kinds = [place.kind for place in PLACES] if tasks is None else [name.strip() for name in tasks.split(",")]
    for kind in kinds:
        check_choice("--tasks", kind, KINDS)
    counts = numbers_of("--nodes", nodes) or [4.0]
    if any(not n.is_integer() or n < 2 for n in counts):
        raise ArgumentError(f"--nodes={nodes!r} should be whole numbers from 2 on, as 4,16")
    return [Place(kind, int(n)) for kind in dict.fromkeys(kinds) for n in dict.fromkeys(counts)]


def _tell(at: Ended) -> None:
    options = ", ".join(f"{name}={value}" for name, value in at.options.items()) or "defaults"
    left = f"about {at.runs_left} runs left, about {readable_seconds(at.left_s)}"
    notice(f"{at.study}, {options}, seed {at.seed}; {left}")
