"""Where the atlas trains its methods: tasks, numbers of nodes, and how the data are divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exogym.errors import check_choice, check_count
from exogym.strategy.registry import STRATEGIES
from exogym.study.tasks import Data
from research.atlas.training import Study
from research.atlas.tuning import takes
from research.reproduce.claim import Cell
from research.reproduce.problems import problem


@dataclass(frozen=True)
class Kind:
    """A task of `research.reproduce.problems`, with the settings that the atlas changes.

    Attributes:
        partition: how to divide the data, or None as the task does.
        steps: number of steps, or None for the task's number.
        clients: share of nodes that a server asks in each round, or None if every node takes part.
    """

    task: str
    says: str
    partition: str | None = None
    steps: int | None = None
    clients: float | None = None


KINDS = {
    "digits": Kind("digits", "8x8 digits, MLP; labels are unequal between nodes"),
    "digits-iid": Kind("digits", "8x8 digits, MLP; examples are divided at random", "iid"),
    "digits-shards": Kind("digits", "8x8 digits, MLP; two label shards per node", "shards:2"),
    "characters": Kind("characters", "Shakespeare by characters, GPT of 0.1M parameters", steps=500),
    "speakers": Kind("by_speaker", "Shakespeare by characters; all lines of a speaker belong to one node", steps=500),
    "pictures": Kind("pictures", "MNIST, CNN; two label shards per node"),
    "clients": Kind(
        "pictures", "MNIST, CNN; two label shards per client, a tenth of the clients per round", clients=0.1
    ),
    "tumors": Kind("tumors", "569 tumors, MLP; labels are unequal between nodes"),
    "cars": Kind("cars", "392 cars' miles per gallon, MLP; examples are divided at random"),
    "roles": Kind("roles", "who speaks in Shakespeare, MLP; labels are unequal between nodes"),
    "words": Kind("words", "Shakespeare's next word, embeddings and an MLP; examples are divided at random"),
    "strokes": Kind("strokes", "MNIST, MLP; two label shards per node"),
    "spoken": Kind("spoken", "ten words of synthetic speech, CNN; each voice belongs to one node"),
}


@dataclass(frozen=True)
class Place:
    """A task with a number of nodes. All nodes together take the same examples per step, for every number of nodes."""

    kind: str
    nodes: int

    def __post_init__(self) -> None:
        check_choice("task", self.kind, KINDS)
        check_count("nodes", self.nodes, least=2)

    def __str__(self) -> str:
        return f"{self.kind}-{self.nodes}"


# Every method trains at the first two places, beside two variants for claims of papers; `TEN` train at the others.
VARIANTS = ("diloco:outer_momentum=0.6", "sparseloco:aggregation=contributors")
PLACES = (Place("digits", 4), Place("characters", 4))  # where every method trains
OTHERS = (
    *(
        Place("digits", 16),
        Place("digits-iid", 4),
        Place("digits-shards", 4),
        Place("characters", 16),
        Place("speakers", 4),
    ),
    *(Place("pictures", 4), Place("pictures", 16), Place("clients", 100), Place("spoken", 4)),
)
# For judging advice (`python -m research judge`): tasks and methods that were named before any
# of their results was known.
UNSEEN = ("tumors", "cars", "roles", "words", "strokes", "spoken")
CANDIDATES = (
    "ddp", "powersgd", "demo", "sparta", "qreduce",
    "diloco:H=10", "diloco:H=30", "diloco:H=100", "streaming_diloco:H=30", "sparseloco:H=10", "sparseloco:H=30",
    "sparseloco:H=100", "noloco:H=30", "fedavg:H=30",
)  # fmt: skip
TEN = (
    *("ddp", "diloco", "streaming_diloco", "sparseloco", "noloco", "fedavg", "scaffold", "sparta", "demo", "powersgd"),
)


def studies_of(
    places: Iterable[Place], methods: Iterable[str], steps: int | None = None, data: Mapping[str, Data] | None = None
) -> list[Study]:
    """Return the studies of all methods at all places.

    Args:
        methods: strategies as text, such as "diloco:H=30". Options in the text are not tuned. At a place with a server,
            methods without a server are left out.
        steps: the steps of each run, or None for each place's own number.
        data: dict from a task's name to the file or folder of its data, if they are not in the usual places.
    """
    parts = (method.partition(":") for method in methods)
    methods = dict.fromkeys(name.strip().lower() + colon + options for name, colon, options in parts)
    return [
        Study(str(place), method, _cell(place, method, steps, (data or {}).get(KINDS[place.kind].task)))
        for place in places
        for method in methods
        if KINDS[place.kind].clients is None or takes(method, "client_fraction")
    ]


def _cell(place: Place, method: str, steps: int | None, data: Data) -> Cell:
    """Return a method's cell at a place. Methods without rounds have a clock with equal speeds for all nodes."""
    kind = KINDS[place.kind]
    task, _ = problem(kind.task, data)
    if kind.clients is not None:
        method += f":client_fraction={kind.clients:g}"
    strategy = STRATEGIES.get(method.partition(":")[0])
    return Cell(
        method, task=kind.task, nodes=place.nodes, steps=steps or kind.steps, partition=kind.partition,
        batch_size=max(1, task.num_nodes * task.batch_size // place.nodes),
        speeds=(1.0,) * place.nodes if strategy is not None and strategy.driven_by == "clock" else None,
    )  # fmt: skip
