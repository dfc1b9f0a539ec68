"""The benchmark's page in Markdown, written only from its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import replacing
from exogym.core.progress import readable_bytes
from exogym.network import readable_seconds
from exogym.study.compare.comparison import Comparison, markdown
from exogym.study.compare.summary import SINGLE, spread_text
from research.benchmark.plots import draw_scaling, draw_task, middle_of
from research.benchmark.results import COUNTS, DEVICE, NETWORKS, SHARED, WIRE

# Our estimates before measuring: reduction, quality, and the use that each method suits.
PLANNED = {
    "ddp": ("1×", "100%", "fast networks"), "diloco": ("10-100×", "95-99%", "slow networks"),
    "sparta": ("100-1000×", "90-95%", "very slow networks"), "fedavg": ("variable", "85-95%", "private data"),
    "demo": ("50-500×", "90-98%", "research"),
}  # fmt: skip
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
IN_HARDWARE = (0, 2)  # positions in SHARED
ABOUT = """\
Compare training methods: their bytes, losses and times for several numbers of nodes. All methods train the same model
from the same weights on the same data.

- All nodes together take the same number of examples per step, for every number of nodes. So the tables show what
  splitting the work costs.
- **Reduction** is DDP's sent bytes divided by the method's sent bytes.
- **Quality** is DDP's validation loss divided by the method's, for the same number of nodes. Above 100 % is better than
  DDP.
- `single` is one of the nodes alone, with its share of the data.
- Sent bytes include the final synchronization. In short runs the final synchronization dominates SPARTA's bytes.
- Numbers are mean ± standard deviation over {seeds}.

`{command}` made this page and its results, {results}.
The command first prints how long it will take. After Ctrl-C the same command continues, because each finished run is
saved. `python -m research benchmark --full` takes hours. It trains all strategies, up to 64 nodes, on MNIST too, and on
CIFAR-10 if you give `--data`. For a quick trial, too short for conclusions:

```bash
python -m research benchmark --short --tasks digits --nodes 2
```
"""


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write the page into `path`, and its pictures into the folder images/ beside the page."""
    images = path.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    for task, parts in _tasks(found).items():
        draw_task(task, parts, path.parent / picture_of(path, task))
    draw_scaling(found["scaling"], path.parent / picture_of(path, "scaling"))
    with replacing(path) as file:
        file.write(text_of(found, path))


def picture_of(page: Path, name: str) -> str:
    return f"images/{page.stem}_{name}.png"


def text_of(found: Mapping[str, Any], page: Path) -> str:
    """Return the page's text."""
    tasks = _tasks(found)
    seeds = max(part["seeds"] for parts in tasks.values() for part in parts)
    results = page.with_suffix(".json").name
    blocks = [
        "# Benchmark\n",
        ABOUT.format(
            seeds="one seed" if seeds == 1 else f"{seeds} seeds",
            command=found["command"],
            results=f"[{results}]({results})",
        ),
        "## Methods\n",
        _methods(tasks),
    ]
    for task, parts in tasks.items():
        blocks += _task(task, parts, picture_of(page, task))
    blocks += _devices(found["hardware"])
    blocks += _counts(found["scaling"], picture_of(page, "scaling"))
    versions = found["versions"]
    blocks.append(
        f"Trained with ExoGym {versions['exogym']}, torch {versions['torch']}, Python {versions['python']} on "
        f"{versions['machine']}, one process, in {_hours(tasks)}.\n"
    )
    return "\n".join(blocks)


def _tasks(found: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return each task's parts, sorted by number of nodes."""
    tasks: dict[str, list[Any]] = {}
    for part in found["parts"].values():
        tasks.setdefault(part["task"], []).append(part)
    return tasks


def _hours(tasks: Mapping[str, Sequence[Any]]) -> str:
    """Return how long the training took, and how long its steps would take at the separately measured rates."""
    all_parts = [part for parts in tasks.values() for part in parts]
    took = readable_seconds(sum(part["wall_s"] for part in all_parts))
    steps_s = 0.0
    for part in all_parts:
        for row in part["rows"]:
            if row["examples_per_s"] is None:
                return took
            examples = part["steps"] * part["batch_size"] * (1 if row["strategy"] == SINGLE else part["nodes"])
            steps_s += row["seeds"] * examples / row["examples_per_s"]
    return f"{took}. The steps alone would take {readable_seconds(steps_s)} at the examples per second above"


def _methods(tasks: Mapping[str, Sequence[Any]]) -> str:
    """Return the table of all tasks: our estimates for each method, and the measured ranges."""
    rows: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for task, parts in tasks.items():
        for part in parts:
            for row in part["rows"]:
                rows.setdefault(row["strategy"], []).append((task, row))
    heads = ["method", "estimated reduction", "reduction", "estimated quality", *(f"quality on {t}" for t in tasks)]
    heads.append("suitable for")
    lines = []
    for method, found in rows.items():
        reduction, quality, use = PLANNED.get(method.partition(":")[0], ("", "", ""))
        cut = _span([row["reduction"] for _, row in found], "{:.3g}×")
        qualities = [_span([row["quality"] for name, row in found if name == task], "{:.0%}") for task in tasks]
        lines.append([f"`{method}`", reduction, cut, quality, *qualities, use])
    nodes = sorted({part["nodes"] for parts in tasks.values() for part in parts})
    said = "We made the estimates before measuring. A range goes from the lowest to the highest mean over runs with "
    said += f"{', '.join(map(str, nodes))} nodes.\n"
    return f"{said}\n{markdown(heads, lines)}\n"


def _span(values: Sequence[float | None], form: str) -> str:
    known = [form.format(x) for x in sorted(x for x in values if x is not None)]
    return "" if not known else known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _task(task: str, parts: Sequence[Any], picture: str) -> Iterator[str]:
    """Yield a task's section: all measures of one part, then quality, bytes and examples per second of all parts."""
    middle = middle_of(parts)
    shown = Comparison(middle["heading"], middle["finding"], middle["rows"], {}, {})
    yield f"## {TITLES.get(task, task.capitalize())}\n"
    yield f"{shown.to_markdown()}\n"
    yield f"![Validation loss against steps; quality against reduction, and against the number of nodes]({picture})\n"
    heads = [f"{part['nodes']} nodes" for part in parts]
    methods = list(dict.fromkeys(row["strategy"] for part in parts for row in part["rows"]))
    found = {(row["strategy"], part["nodes"]): row for part in parts for row in part["rows"]}
    for title, text in (
        ("quality", lambda row: spread_text(row, "quality", "{:.1%}")),
        ("validation loss", lambda row: spread_text(row, "val_loss", "{:.4f}")),
        ("sent/node", lambda row: readable_bytes(row["tx_bytes"]) if row["tx_bytes"] is not None else ""),
        ("examples/s, simulated here", lambda row: spread_text(row, "examples_per_s", "{:,.0f}")),
    ):
        cells = [
            [text(found[m, part["nodes"]]) if (m, part["nodes"]) in found else "" for part in parts] for m in methods
        ]
        if any(map(any, cells)):
            yield markdown([title, *heads], [[f"`{m}`", *line] for m, line in zip(methods, cells, strict=True)]) + "\n"
    yield _rates(middle)


def _rates(part: Mapping[str, Any]) -> str:
    """Return the table of predicted examples per second on networks."""
    heads = ["examples/s, predicted", *NETWORKS]
    lines = [
        [f"`{method}`", *("" if rates[name] is None else f"{rates[name]:,.0f}" for name in NETWORKS)]
        for method, rates in part["predicted"].items()
    ]
    said = (
        f"*Simulated here*: one {part['device']} computes all nodes in turn, without network time. We measured these "
        f"speeds apart from the training, {part['seeds']} times for each method. The next table has the speeds that "
        f"`exogym advise` predicts for {part['nodes']} real nodes on the named networks, with this model of "
        f"{part['parameters']:,} parameters. Each node is as fast as `single` here.\n"
    )
    return f"{said}\n{markdown(heads, lines)}\n" if lines else ""


def _devices(hardware: Mapping[str, Any]) -> Iterator[str]:
    yield "## Hardware\n"
    yield (
        "These speed-ups over one device alone are predicted, not measured. 4 nodes train GPT-2 small (124M "
        "parameters) with 8 windows of 1,024 tokens per node and step. Devices reach 40 % of their peak. Each cell has "
        f"the speed-ups of {' and '.join(f'`{SHARED[k]}`' for k in IN_HARDWARE)}. At most 4 is possible. Below 1, "
        "four nodes are slower than one. The table does not predict losses.\n"
    )
    lines = [
        [device, readable_seconds(each["step_s"]), *(_pair(each[name]) for name in NETWORKS)]
        for device, each in hardware.items()
    ]
    yield markdown(["device", "step", *NETWORKS], lines) + "\n"


def _pair(speedups: Sequence[float]) -> str:
    return " / ".join(f"{speedups[k]:.2g}" for k in IN_HARDWARE)


def _counts(scaling: Mapping[str, Sequence[float]], picture: str) -> Iterator[str]:
    yield "## Many nodes\n"
    yield (
        f"The table has predicted speed-ups over one node alone, for the same model on `{DEVICE}` with `{WIRE}` "
        "between nodes. A ring's bytes per node hardly grow with the number of nodes; DDP and DiLoCo use a ring. "
        "DeMo's nodes receive more bytes if there are more nodes.\n"
    )
    lines = [[f"`{method}`", *(f"{scaling[str(n)][k]:.3g}" for n in COUNTS)] for k, method in enumerate(SHARED)]
    yield markdown(["method", *(f"{n} nodes" for n in COUNTS)], lines) + "\n"
    yield f"![Predicted speed-up against the number of nodes]({picture})\n"
