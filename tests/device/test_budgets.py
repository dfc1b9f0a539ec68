"""How often a run launches kernels and waits for the device. Small models on an accelerator are bound by both.

The counts are the fake device's, which names the line of each wait: `fake.where("sync")`.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.record.metrics import spread
from exogym.strategy import DiLoCoStrategy, QSGDStrategy, SimpleReduceStrategy

NODES = 4


def examples(count):
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 64, generator=draw), torch.randint(10, (count,), generator=draw))


def train(fake, strategy, callback, width=32, nodes=NODES, steps=200, val=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    trainer = LocalTrainer(model, examples(512), val, loss_fn=nn.functional.cross_entropy)
    given = {"num_nodes": nodes, "max_steps": steps, "batch_size": 8, "progress": False}
    trainer.fit(strategy, device="fake", callbacks=[callback], **given | options)
    return trainer


def per_step(fake, strategy, period, nodes=NODES, **options):
    """Return the launches, the waits and the copies to the device of a node's step, in the second `period` of two."""
    found = []

    def look(loop):
        if loop.step == period:
            fake.reset()
        elif loop.step == 2 * period:
            found.extend(n / nodes / period for n in (fake.launches(), fake.count("sync"), fake.count("h2d pageable")))
            found.append(fake.where("sync") + fake.where("h2d"))

    train(fake, strategy, Every(period, look), nodes=nodes, steps=2 * period + 1, **options)
    return found


# strategy, steps, options, and at most so many launches, waits and blocking copies in a node's step
BUDGETS = {
    "ddp": (lambda: SimpleReduceStrategy(lr=0.01), 10, {}, 30, 1.0, 0.0),
    "ddp vmap": (lambda: SimpleReduceStrategy(lr=0.01), 10, {"compute": "vmap"}, 25, 1.0, 0.0),
    "diloco": (lambda: DiLoCoStrategy(lr=0.01, H=50), 50, {}, 25, 0.05, 0.01),
    "diloco vmap": (lambda: DiLoCoStrategy(lr=0.01, H=50), 50, {"compute": "vmap"}, 20, 0.05, 0.01),
    # each step may overflow
    "fp16": (lambda: DiLoCoStrategy(lr=0.01, H=50), 50, {"precision": "fp16"}, 75, 1.05, 0.01),
    "qsgd": (lambda: QSGDStrategy(lr=0.01), 10, {}, 75, 1.0, 0.25),  # noise from the CPU, once a step for all nodes
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_nodes_step_launches_and_waits_little(name, fake):
    make, steps, options, *most = BUDGETS[name]
    *found, where = per_step(fake, make(), steps, **options)
    assert all(n <= limit for n, limit in zip(found, most, strict=True)), (found, where)


def test_an_evaluation_of_eight_nodes_waits_five_times(fake):
    found = {}

    def look(loop):
        fake.reset()
        loop.evaluate()
        spread(loop.fleet)
        found.update(launches=fake.launches(), waits=fake.count("sync"), where=fake.where("sync"))

    trainer = train(
        fake, DiLoCoStrategy(lr=0.01, H=20), Every(20, look), width=960, nodes=8, steps=20, val=examples(128)
    )
    assert sum(p.numel() for p in trainer.model.parameters()) > 990_000
    assert found["launches"] <= 100 and found["waits"] <= 5, found


def test_vmap_launches_for_all_rows_what_the_loop_launches_for_one(fake):
    """But each row's optimizer takes its own step."""
    launches = {}
    for nodes in (1, 8):
        for compute in ("loop", "vmap"):
            found = per_step(fake, DiLoCoStrategy(lr=0.01, H=20), 20, nodes=nodes, compute=compute)
            launches[nodes, compute] = found[0] * nodes
    assert launches[8, "vmap"] < 0.5 * launches[8, "loop"], launches
