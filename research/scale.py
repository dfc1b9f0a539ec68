"""Write tables on 1B parameters, from formulas, into docs/predictions.md and research/results/measured.md.

python -m research.scale
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exogym.network import Network, readable_seconds
from exogym.progress import readable_bytes
from exogym.study.advise import Row, Work, advise

ROOT = Path(__file__).parents[1]
PAGE, FULL_PAGE = ROOT / "docs" / "predictions.md", ROOT / "research" / "results" / "measured.md"
CLUSTERS = "infiniband", "lan-10g", "wan"
NODES = 64, 1_000, 10_000
P, TOKENS = 1e9, 65_536
CORE = (
    "ddp", "diloco", "streaming_diloco", "async_diloco", "muloco", "sparseloco", "noloco", "fedavg", "fedprox",
    "fedopt", "scaffold", "post_local_sgd", "sparta", "sparta_diloco", "demo", "gossip", "powersgd", "topk", "signsgd",
    "qsgd",
)  # fmt: skip
SHOWN = "ddp", "diloco", "sparseloco", "sparta", "demo"  # on the shorter page
STREAMING = "streaming_diloco:H=100:num_fragments=8:fragment_sync_delay=1"
PAPER = {  # Streaming DiLoCo, table 4: 1B parameters on 2 nodes, by Gbit/s, the published share of the time computing
    "ddp": {86.8: 0.5, 184.2: 0.9},
    "diloco:H=100": {1.4: 0.5, 13.3: 0.9, 86.8: 0.99},
    STREAMING: {1.4: 0.5, 6.2: 0.9, 11.0: 0.99},
    f"{STREAMING}:bits=4": {0.4: 0.5, 1.7: 0.9, 3.0: 0.99},
}
INTERNET = {  # Covenant-72B's report, section 4.3: parameters, nodes, a step's seconds, the published share
    "SparseLoCo, 8B on 15 peers": (8e9, 15, 9.0, 0.957), "Covenant-72B, on 20 peers": (72e9, 20, 40.0, 0.945),
}  # fmt: skip


def asked(cluster: str, num_nodes: int) -> dict[str, Row]:
    """Return the row of each strategy on a cluster."""
    work = Work(6 * P * TOKENS)
    rows = advise(parameters=P, num_nodes=num_nodes, network=cluster, step_seconds=work, strategies=CORE).rows
    return {row.strategy: row for row in rows}


def sizes_table(strategies: Sequence[str]) -> list[str]:
    """Return the lines of the table of bytes and times. Strategies with the same cells share a row."""
    asked_for = {cluster: [asked(cluster, num_nodes) for num_nodes in NODES] for cluster in CLUSTERS}
    lines = ["| strategy | bytes sent | " + " | ".join(f"`{cluster}`" for cluster in CLUSTERS) + " |"]
    lines.append("| --- " * (2 + len(CLUSTERS)) + "|")
    alike: dict[str, list[str]] = {}
    for strategy in strategies:
        rows = {cluster: [column[strategy] for column in columns] for cluster, columns in asked_for.items()}
        cells = [", ".join(readable_bytes(row.tx_bytes_per_step) for row in rows[CLUSTERS[0]])]
        cells += [", ".join(readable_seconds(row.seconds_per_step) for row in rows[cluster]) for cluster in CLUSTERS]
        alike.setdefault(" | ".join(cells), []).append(strategy)
    return lines + [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]


def paper_table() -> list[str]:
    """Return the lines of the table beside Streaming DiLoCo's bandwidths."""
    published = sorted({share for shares in PAPER.values() for share in shares.values()})
    lines = ["| strategy | " + " | ".join(f"published {share:.1%}" for share in published) + " |"]
    lines.append("| --- " * (len(published) + 1) + "|")
    for text, shares in PAPER.items():
        found = {
            share: f"{predicted(1e9, 2, Network(f'{gbps}Gbps'), 0.1, text, 2.0):.1%} at {gbps} Gbit/s"
            for gbps, share in shares.items()
        }
        lines.append(f"| `{text}` | " + " | ".join(found.get(share, "") for share in published) + " |")
    return [line.replace("%", " %") for line in lines]


def internet_table() -> list[str]:
    """Return the lines of the table beside trainings over the internet."""
    lines = ["| training over the internet | published | predicted |", "| --- " * 3 + "|"]
    network = Network(down="500Mbps", up="110Mbps")
    for run, (parameters, nodes, step_s, share) in INTERNET.items():
        ours = predicted(parameters, nodes, network, step_s, "sparseloco:H=30", 4.0)
        lines.append(f"| {run} | {share:.1%} | {ours:.1%} |".replace("%", " %"))
    return lines


def predicted(parameters: float, nodes: int, network: Network, step_s: float, strategy: str, b: float) -> float:
    """Return the predicted share of the time computing, with `b` bytes per value."""
    (row,) = advise(
        parameters=parameters, num_nodes=nodes, network=network, step_seconds=step_s, strategies=[strategy],
        bytes_per_element=b,
    ).rows  # fmt: skip
    return row.utilisation


def with_tables(page: str, tables: Sequence[Sequence[str]]) -> str:
    """Return the page with its tables written anew: a table begins with its first line and ends at an empty line."""
    for table in tables:
        before, _, after = page.partition(table[0])
        page = before + "\n".join(table) + "\n\n" + after.partition("\n\n")[2]
    return page


def pages() -> dict[Path, str]:
    """Return both pages with their tables written anew."""
    tables = {PAGE: [sizes_table(SHOWN), internet_table()], FULL_PAGE: [sizes_table(CORE), paper_table()]}
    return {page: with_tables(page.read_text("utf-8"), found) for page, found in tables.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, "utf-8")
