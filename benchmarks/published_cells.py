"""Predict cells that others published, with the public API and the inputs that each publication states.

    python benchmarks/published.py benchmarks/published_cells.csv

A file has a row for each cell, with the columns source, cell (its conditions), published, unit, read (whether its
inputs are stated), and ours (the prediction of November 2026, before a network had a library). `--csv FILE` writes the
rows with the present predictions. This module knows the inputs of these sources:

- BinhangYuan/tc_cluster_setting: collectives on AWS p3.2xlarge with one V100 each. `tc` sets a rate and a one-way delay
  for what a host sends; a host receives up to 10 Gbit/s. MB are 2^20 bytes. NCCL opened 8 sockets per pair. gloo has a
  single one, for which AWS allows 5 Gbit/s ("single-flow traffic" in the EC2 user guide) and Linux a window of 3 MiB
  (half of tcp_rmem's maximum of 6 MiB; tcp(7)).
- DS3Lab/Decentralized_FM_alpha: GPT-3's layers as a pipeline of V100s, behind the same `tc`. The page states sizes of
  activations and of stages. The time of computing is the one with which the prediction for the default network equals
  the page's time. Backward passes take three times as long as forward passes (activations are computed again). With
  data parallelism, the page's own time of a single pipeline is given.
- The table of arXiv:2102.02888: BERT-Large with 340 million parameters in fp16, and the step's other times. 4.1 Gbit/s
  are what its authors measured with iperf on 40 Gbit/s Ethernet (recalled, not read again).
- One probe: all-reduces of 128 MB from tc_cluster_setting, and `tc`'s delay.

All other cells keep `ours`: nothing in their predictions has changed.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exogym.errors import DataError
from exogym.network import Network

MIB = 2**20
AWS = "10Gbps"
BASE_S = 1e-4  # "about 0.1ms"
LAYER_TENSORS = 16  # four linear layers of attention, two of the MLP, two norms, each with a bias
WITHIN = {"10 %": 1.1, "25 %": 1.25, "factor 2": 2.0}  # a prediction is within x % if it is between 1 - x and 1 + x

# Seconds of tc_cluster_setting's all-reduces of 128 MB, by library and setting, for 4, 8, 16 and 32 nodes
PROBES = {
    "Gloo": {
        "AWS default": (0.327, 0.382, 0.412, 0.428), "delay 1ms  bandwidth 5Gbps": (0.485, 0.537, 0.612, 0.629),
        "delay 5ms  bandwidth 2Gbps": (1.517, 1.814, 1.950, 1.992),
        "delay 10ms  bandwidth 1Gbps": (2.993, 3.582, 3.873, 3.940),
    },
    "NCCL": {
        "AWS default": (0.175, 0.208, 0.252, 0.252), "delay 1ms  bandwidth 5Gbps": (0.329, 0.383, 0.410, 0.434),
        "delay 5ms  bandwidth 2Gbps": (0.835, 0.970, 1.038, 1.071),
        "delay 10ms  bandwidth 1Gbps": (1.669, 1.940, 2.076, 2.141),
    },
}  # fmt: skip
# Decentralized_FM_alpha: seconds of a pipeline alone on (default, 1 ms 5 Gbit/s, 5 ms 2, 10 ms 1, 50 ms 1), by model
NETS = ("default", "1ms 5Gbps", "5ms 2Gbps", "10ms 1Gbps", "50ms 1Gbps")
PIPELINES = {
    "GPT3-small fp32 S3 B64": (5.91, 6.01, 6.07, 7.90, 8.77), "GPT3-small fp16 S3 B64": (2.25, 2.26, 2.55, 4.01, 4.78),
    "GPT3-XL fp32 S12 B64": (15.16, 15.49, 16.80, 22.90, 29.08),
    "GPT3-XL fp16 S12 B64": (4.56, 5.32, 7.16, 12.24, 12.96),
    "GPT3-XL fp16 S8 B96": (8.14, 8.79, 10.69, 15.64, 16.23),
    "GPT3-XL fp16 S8 B108": (9.30, 10.20, 11.60, 17.78, 18.41),
    "GPT3-XL fp16 S8 B64": (5.97, 6.20, 8.31, 12.04, 12.62), "GPT3-XL fp16 S8 B32": (3.51, 3.63, 5.09, 8.50, 10.06),
}  # fmt: skip
LATER_B96 = (8.34, 9.36, 11.02, 16.27, 16.74)  # the same, three days later
STAGE_MB = {"GPT3-small": 198, "GPT3-XL S12": 626, "GPT3-XL S8": 818}  # the first stage, in fp32
ACTIVATION_MB = {"GPT3-small": 6, "GPT3-XL": 16}  # of a micro-batch, in fp32
# 1-bit Adam's table, milliseconds: forward, the rest of backward, step; by network, nodes and accumulation
COMPUTING_MS = {
    ("Ethernet", 16, 1): ((36.65, 33.63, 74.96), (35.71, 60.81, 75.59)), 
    ("Ethernet", 16, 4): ((137.80, 243.72, 74.92),), ("Ethernet", 8, 1): ((37.91, 60.71, 75.63),),
    ("Ethernet", 4, 1): ((36.94, 62.82, 76.85),),
    ("Ethernet", 2, 1): ((34.95, 61.23, 75.26),), ("InfiniBand", 8, 1): ((25.36, 23.25, 58.49), (32.81, 59.99, 57.79)),
    ("InfiniBand", 8, 4): ((131.04, 237.92, 56.91),), ("InfiniBand", 4, 1): ((33.45, 56.81, 57.98),),
    ("InfiniBand", 2, 1): ((32.86, 56.49, 58.60),),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A published value, and the earlier and the present prediction."""

    source: str
    cell: str
    published: float
    unit: str
    read: str
    before: float
    predicted: float
    is_kept: bool

    @property
    def is_stated(self) -> bool:
        """Whether the publication states all inputs."""
        return "not stated" not in self.read and "not on the page" not in self.read

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def ratio_before(self) -> float:
        return self.before / self.published


def read(path: Path) -> list[Cell]:
    """Return a file's cells with their predictions.

    Raises:
        DataError: the file lacks a column or has a value that is no number.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cells = []
    for line, row in enumerate(rows, 2):
        try:
            published, before = float(row["published"]), float(row["ours"])
            now = predicted(row["source"], row["cell"], published)
            now, is_kept = (before, True) if now is None else (now, False)
            cells.append(Cell(row["source"], row["cell"], published, row["unit"], row["read"], before, now, is_kept))
        except (KeyError, ValueError) as error:
            raise DataError(f"{path}, line {line}: {error}") from None
    return cells


def predicted(source: str, cell: str, published: float) -> float | None:
    """Return the prediction for a cell, or None if this module does not have its inputs."""
    try:
        return _predicted(source, cell, published)
    except (LookupError, TypeError, ValueError, AttributeError):  # a cell of another form
        return None


def _predicted(source: str, cell: str, published: float) -> float | None:
    if source.startswith("tc_cluster_setting"):
        return _of_tc(source.removeprefix("tc_cluster_setting "), cell)
    if source.startswith("from one probe"):
        return _from_probe(source.rpartition(": ")[2], cell)
    if source.startswith("Decentralized_FM"):
        return _of_pipelines(source, cell, published)
    if source.startswith("1-bit Adam"):
        return _of_one_bit_adam(source, cell, published)
    if source.startswith("DeMo"):  # "k=1, chunk 64": 12 bytes for each coefficient of a model of 1B parameters, as sent
        return 1769976 / 6 * 12
    return None


def behind_tc(setting: str, library: str, **options: str) -> Network:
    """Return the network of a setting such as "delay 1ms  bandwidth 5Gbps", "1ms 5Gbps" or "AWS default"."""
    rate = re.search(r"([\d.]+)\s*Gbps", setting)
    delay = re.search(r"([\d.]+)\s*ms", setting)
    latency_s = float(delay[1]) / 1e3 if delay else BASE_S
    if library == "gloo":
        options["stream"] = "3MiB" if 8 * 3 * MIB / (2 * latency_s) < 5e9 else "5Gbps"
    return Network(up=f"{rate[1]}Gbps" if rate else AWS, down=AWS, latency=latency_s, library=library, **options)


def _of_tc(what: str, cell: str) -> float | None:
    library = "gloo" if "Gloo" in what else "nccl"
    if what.startswith("cross-region"):
        size, trip, rate = re.search(r"(\d+) MB, ping (\d+) ms, iperf3 -P 32 (.*)", cell).groups()  # type: ignore[union-attr]
        network = Network(rate.replace(" ", ""), float(trip) / 2e3, library="nccl")
        return network.cost("send", int(size) * MIB, 2).seconds
    size = MIB * int(re.search(r"(\d+) MB", cell)[1])  # type: ignore[index]
    if what.startswith("p2p"):
        return behind_tc(cell.partition(", ")[2], library).cost("send", size, 2).seconds
    nodes, setting = int(cell.split()[0]), cell.split(", ", 2)[2]
    if what.startswith("Simulate_DP"):
        pieces = int(re.search(r"in (\d+) pieces", cell)[1])  # type: ignore[index]
        network = behind_tc(setting, library, bucket=f"{size // pieces}B")
        kinds = {"all-reduce": ("all_reduce",), "central": ("reduce", "broadcast")}.get(what.split()[1])
        if kinds is not None:
            return sum(network.cost(kind, size, nodes).seconds for kind in kinds)
        return _sharded(behind_tc(setting, library), size, nodes)
    kind = {"allreduce": "all_reduce"}.get(what.split()[0], what.split()[0])
    return behind_tc(setting, library).cost(kind, size, nodes).seconds


def _sharded(network: Network, size: float, nodes: int) -> float:
    """Return the seconds of a sharded server: both halves send to all members at once."""
    return 2 * network.cost("all_to_all", size, nodes).seconds


def _from_probe(what: str, cell: str) -> float:
    kind, size, _, library = what.split()
    nodes, setting = int(cell.split()[0]), cell.split(", ", 1)[1]
    delay = re.search(r"delay (\d+)ms", setting)
    probe_s = PROBES[library][setting][(4, 8, 16, 32).index(nodes)]
    network = Network.measured(
        {128 * MIB: probe_s}, num_nodes=nodes, latency=float(delay[1]) / 1e3 if delay else BASE_S,
        library=library.lower(),
    )  # fmt: skip
    return network.cost({"allreduce": "all_reduce"}.get(kind, kind), int(size) * MIB, nodes).seconds


def pipeline(model: str, net: str, default_s: float) -> float:
    """Return the seconds of a pipeline's step, from its time on the default network."""
    name, precision, stages, batch = model.split()
    size = ACTIVATION_MB[name] * MIB / (2 if precision == "fp16" else 1)
    row = (size, int(stages[1:]), int(batch[1:]), 3.0)
    default, least, most = behind_tc("", "nccl"), 0.0, default_s
    for _ in range(60):  # the computing with which the prediction for the default network is the page's
        middle = (least + most) / 2
        is_short = default.pipeline_s(middle, *row) < default_s
        least, most = (middle, most) if is_short else (least, middle)
    return behind_tc(net, "nccl").pipeline_s(least, *row)


def _of_pipelines(source: str, cell: str, published: float) -> float | None:
    model, _, net = cell.rpartition(", ")
    if "pipeline only" in source:
        rows = PIPELINES.get(model)
        if rows is None or net not in NETS:
            return None
        rows = LATER_B96 if rows == PIPELINES["GPT3-XL fp16 S8 B96"] and published in LATER_B96 else rows
        return pipeline(model, net, rows[0])
    name, precision = model.split()[:2]
    stages = re.search(r" (S\d+)", model)
    key = f"{name} {stages[1]}" if stages and name == "GPT3-XL" else "GPT3-XL S12" if name == "GPT3-XL" else name
    depth, batch = {"GPT3-small": ("S3", 64), "GPT3-XL S12": ("S12", 64), "GPT3-XL S8": ("S8", 96)}[key]
    nodes, half = int(re.search(r"DP (\d+)", model)[1]), 2 if precision == "fp16" else 1  # type: ignore[index]
    network, size = behind_tc(net, "nccl"), STAGE_MB[key] * MIB / half
    if "sharded" in source:
        extra_s = _sharded(network, size, nodes)
    elif ", ps" in source:
        extra_s = sum(network.cost(kind, size, nodes).seconds for kind in ("reduce", "broadcast"))
    else:
        extra_s = sum(network.cost("all_reduce", tensor, nodes).seconds for tensor in _tensors(4, 768, half))
    if "extra seconds" in source:
        return extra_s
    return PIPELINES[f"{name} {precision} {depth} B{batch}"][NETS.index(net)] + extra_s


def _tensors(layers: int, width: int, half: int) -> list[float]:
    """Return the bytes of the first stage's tensors: its layers, and embeddings of 30,522 words and 2,048 places."""
    square, long = width * width, 4 * width * width
    layer = [square] * 4 + [long] * 2 + [width] * 9 + [4 * width]
    assert len(layer) == LAYER_TENSORS
    return [4 / half * size for size in [30522 * width, 2048 * width, *layer * layers]]


def _of_one_bit_adam(source: str, cell: str, published: float) -> float | None:
    nodes, gpus, accumulation = map(int, re.findall(r"(\d+) nodes x (\d+) GPUs, grad. accumulation (\d+)", cell)[0])
    kind = "Ethernet" if "Ethernet" in source else "InfiniBand"
    options = {"efficiency": 4.1 / 40} if kind == "Ethernet" else {}
    line = Network("40Gbps" if kind == "Ethernet" else "100Gbps", **options)
    network = Network.groups([gpus] * nodes, "nvlink", line, library="nccl")
    seconds = network.cost("all_reduce", 2 * 340e6, nodes * gpus).seconds
    if "share" not in source:
        return seconds
    rows = COMPUTING_MS.get((kind, nodes, accumulation))
    if rows is None:
        return None
    row = rows[0] if len(rows) == 1 or published >= {"Ethernet": 0.935, "InfiniBand": 0.72}[kind] else rows[1]
    return seconds / (seconds + sum(row) / 1e3)


def short(source: str) -> str:
    """Return a source's name without remarks in parentheses, except that the rate is unknown."""
    unknown = " on AWS without tc" if "up to 10" in source or "(AWS default)" in source else ""
    return re.sub(r"\s*\([^)]*\)+", "", source).replace("  ", " ").strip(" )") + unknown


def share(ratios: Sequence[float], most: float) -> float:
    """Return the share of ratios that are within 10 or 25 %, or within a factor of 2."""
    least = 1 / most if most == WITHIN["factor 2"] else 2 - most
    return sum(least <= ratio <= most for ratio in ratios) / len(ratios)


def table(cells: Sequence[Cell]) -> str:
    """Return a table in Markdown: for each source the cells within 10 %, 25 % and a factor of 2, and the median."""
    names = list(dict.fromkeys(short(cell.source) for cell in cells))
    groups = {name: [cell for cell in cells if short(cell.source) == name] for name in names}
    groups["all whose inputs are stated"] = [cell for cell in cells if cell.is_stated]
    head = ["source", "cells", *(f"within {name}" for name in WITHIN), "median", "before: within 25 %", "factor 2"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, group in groups.items():
        now, before = [cell.ratio for cell in group], [cell.ratio_before for cell in group]
        shares = [f"{share(now, most):.0%}" for most in WITHIN.values()]
        old = [f"{share(before, WITHIN[way]):.0%}" for way in ("25 %", "factor 2")]
        row = [name, str(len(group)), *shares, f"{statistics.median(now):.2f}", *old]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def write(cells: Sequence[Cell], path: Path) -> None:
    """Write the cells with their predictions into a CSV file that `read` can read."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["source", "cell", "published", "unit", "read", "ours", "predicted", "ratio"])
        for c in cells:
            numbers = [f"{c.before:.4g}", f"{c.predicted:.4g}", f"{c.ratio:.3f}"]
            rows.writerow([c.source, c.cell, f"{c.published:.6g}", c.unit, c.read, *numbers])
