"""Test strategies against the laws (properties that every strategy must have), and compare models by fingerprint.

    from exogym.testing import check_strategy
    check_strategy(lambda: MyStrategy(lr=0.01))

If a law doesn't hold, the `StrategyError` names the law, what the test observed, and the usual cause.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from exogym.callbacks import Every
from exogym.core.base.devices import CPU
from exogym.core.base.rng import generator
from exogym.core.base.torch_private import strided_parts
from exogym.core.communicator import Communicator, Wire
from exogym.core.fleet import Fleet
from exogym.core.progress import without_notices
from exogym.core.record.history import History
from exogym.core.training.meeting import Meeting
from exogym.errors import ArgumentError, StrategyError, check_choice, checked
from exogym.strategy import communicate
from exogym.strategy.strategy import Run, Strategy
from exogym.trainer import LocalTrainer

LAWS = ("repeatable", "stretches", "stopping", "placement", "single node", "bytes", "learns")


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the model's state dict: the names, dtypes, shapes and bytes of all tensors, in order.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> fingerprint(a) == fingerprint(copy.deepcopy(a)) != fingerprint(b)
    True
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            for part in strided_parts(value.detach()):
                digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def small_problem(seed: int = 0) -> tuple[nn.Module, TensorDataset]:
    """Return a small network with dropout and batch normalization, and a data set of 256 examples that it can learn."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 6, generator=g)
    y = torch.tanh(x @ torch.randn(6, 2, generator=g))
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.05), nn.Linear(16, 2)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=g) / math.sqrt(p.shape[1]))
            elif p is not layers[1].weight:
                p.zero_()
    return model, TensorDataset(x, y)


@checked
def check_strategy(
    factory: Callable[[], Strategy],
    *,
    num_nodes: int = 4,
    steps: int = 24,
    payload_bytes: Callable[[int, int], float] | None = None,
    learning: float = 0.7,
    skip: tuple[str, ...] = (),
) -> dict[str, str]:
    """Test a strategy against the laws.

    Args:
        factory: a function that returns a new strategy. `check_strategy` calls it once per run.
        num_nodes: number of nodes in each run.
        steps: number of steps in each run, large enough for the strategy to communicate a few times.
        payload_bytes: a function of (bytes of the model's parameters, steps) that returns each node's payload in the
            whole run, in bytes, including the final synchronization if steps are left after the last one. If it is
            None, the law "bytes" is not tested.
        learning: the validation loss must fall below `learning` times its first value.
        skip: names of laws not to test.

    Returns:
        A dict that maps each law's name to the test's finding.

    Raises:
        StrategyError: a law does not hold.
        ArgumentError: `factory` or `payload_bytes` is not a function, or `skip` names an unknown law.

    >>> from exogym.strategy import SimpleReduceStrategy
    >>> seen = check_strategy(lambda: SimpleReduceStrategy(lr=0.02), payload_bytes=lambda row, steps: row * steps)
    >>> seen["bytes"]
    '17088 bytes per node'
    """
    if not callable(factory):
        raise ArgumentError(
            f"factory={factory!r} must be a function that returns a new strategy, such as lambda: DiLoCoStrategy(H=5)"
        )
    if payload_bytes is not None and not callable(payload_bytes):
        raise ArgumentError(
            f"payload_bytes={payload_bytes!r} must be a function, such as lambda row_bytes, steps: row_bytes * steps"
        )
    for name in skip:
        check_choice("skip", name, LAWS)
    battery = _Battery(factory, num_nodes, steps, payload_bytes, learning)
    seen = {}
    for law in LAWS:
        if law not in skip:
            seen[law] = getattr(battery, law.replace(" ", "_"))()
    return seen


class _Battery:
    def __init__(
        self,
        factory: Callable[[], Strategy],
        nodes: int,
        steps: int,
        payload: Callable[[int, int], float] | None,
        learning: float,
    ):
        self.factory, self.nodes, self.steps, self.payload, self.learning = factory, nodes, steps, payload, learning
        self.learning_steps = 10 * steps
        self.stops: Sequence[int] = sorted({1, steps // 2, steps - 1} - {0, steps})
        self.reference, self.history = self.run()

    def run(
        self, nodes: int | None = None, max_stretch: int | None = None, **options: Any
    ) -> tuple[nn.Module, History]:
        model, data = small_problem()
        trainer = LocalTrainer(model, data, data, loss_fn=nn.functional.mse_loss)
        trainer.max_stretch = max_stretch
        given: dict[str, Any] = {"max_steps": self.steps, "batch_size": 8, "device": CPU, "progress": False} | options
        trainer.fit(self.factory(), num_nodes=nodes or self.nodes, **given)
        return model, trainer.history

    def off(self, model: nn.Module) -> str:
        """Return how far the weights of `model` are from the reference run's; "" if they are bitwise identical."""
        if fingerprint(model) == fingerprint(self.reference):
            return ""
        found, wanted = (parameters_to_vector(x.parameters()).detach() for x in (model, self.reference))
        return f"by up to {float((found - wanted).abs().max()):.3g} (the largest is {float(wanted.abs().max()):.3g})"

    def repeatable(self) -> str:
        again, _ = self.run()
        if off := self.off(again):
            raise StrategyError(
                f"law 'repeatable': two runs with the same seed end with weights that differ {off}. Draw random "
                "numbers only from generators seeded with the run's seed and the step"
            )
        return "two runs are bitwise identical"

    def stretches(self) -> str:
        capped, _ = self.run(max_stretch=1)
        if off := self.off(capped):
            raise StrategyError(
                f"law 'stretches': training in single steps and in whole stretches gives weights that differ {off}. "
                "next_event() must return every step at which the strategy acts, and local_steps() must not depend "
                "on where a stretch ends"
            )
        return "training one step at a time is bitwise identical"

    def stopping(self) -> str:
        for stop in self.stops:
            with tempfile.TemporaryDirectory() as folder:
                self.run(save_dir=folder, checkpoint_interval=stop, callbacks=[Every(stop, lambda loop: True)])
                with without_notices():  # no notice that the run continues
                    resumed, history = self.run(save_dir=folder, resume=True)
            if off := self.off(resumed):
                raise StrategyError(
                    f"law 'stopping': a run that stopped after step {stop} and resumed ends with weights that differ "
                    f"{off} from those after an uninterrupted run. Keep everything that changes during training in a "
                    "module's row_state or shared_state, or in a plain number. A strategy for one node may keep "
                    "tensors and numbers in any attribute"
                )
            sent, wanted = (float(one.column("payload_bytes")[1][-1]) for one in (history, self.history))
            if sent != wanted:
                raise StrategyError(
                    f"law 'stopping': a run that stopped after step {stop} and resumed counted {sent:.1f} payload "
                    f"bytes per node, but an uninterrupted run {wanted:.1f}"
                )
        return "runs that stop and resume are bitwise identical"

    def placement(self) -> str:
        """Test with random local steps that rows in one block, in two blocks and in one each give identical bits."""
        strategy = self.factory()
        if strategy.driven_by != "rounds":
            return "no module acts on several rows together, so nodes are always separate"
        whole = _mix_blocks(strategy, [list(range(self.nodes))], self.nodes, self.steps)
        for blocks in ([[i] for i in range(self.nodes)], [list(range(1)), list(range(1, self.nodes))]):
            if not all(blocks):
                continue
            apart = _mix_blocks(strategy, blocks, self.nodes, self.steps)
            if not torch.equal(whole, apart):
                off = float((whole - apart).abs().max())
                raise StrategyError(
                    f"law 'placement': if rows are in blocks {blocks}, the parameters differ by up to {off:.3g} from "
                    "a run with all rows in one block. Some operation crosses the row axis (a norm, mean or topk "
                    "over all of x). Combine rows only through the communicator"
                )
        return "rows in one block, in two and in one each give identical bits"

    def single_node(self) -> str:
        _, history = self.run(nodes=1)
        if (sent := history.column("tx_bytes")[1][-1]) != 0:
            raise StrategyError(f"law 'single node': a single node sends {sent:.0f} bytes, but no other node exists")
        return "a single node trains and sends nothing"

    def bytes(self) -> str:
        seen = float(self.history.column("payload_bytes")[1][-1])
        if self.payload is None:
            return f"{seen:.0f} bytes per node; no formula to compare with"
        model, _ = small_problem()
        row = sum(p.numel() * p.element_size() for p in model.parameters())
        wanted = self.payload(row, self.steps)
        if abs(seen - wanted) > 1e-9 * max(1.0, wanted):
            last = " (the difference is one model: the final synchronization)" if seen - wanted == row else ""
            raise StrategyError(
                f"law 'bytes': in {self.steps} steps and the final synchronization, each node's payload was "
                f"{seen:.1f} bytes, but payload_bytes({row}, {self.steps}) returned {wanted:.1f}{last}"
            )
        return f"{seen:.0f} bytes per node"

    def learns(self) -> str:
        _, history = self.run(max_steps=self.learning_steps)
        losses = history.column("val_loss")[1]
        if not losses[-1] < self.learning * losses[0]:
            raise StrategyError(
                f"law 'learns': in {self.learning_steps} steps the validation loss went from {losses[0]:.4f} to "
                f"{losses[-1]:.4f}, not below {self.learning} of its first value. Check the sign of the update and "
                "the learning rate: AdamW needs about 0.02 for this small model"
            )
        return f"validation loss from {losses[0]:.4f} to {losses[-1]:.4f}"


class _MeetingWire(Wire):
    """Carry rows between blocks that run as programs and meet at collectives."""

    def __init__(self, blocks: list[list[int]], process: int):
        super().__init__(blocks[process])
        self.placement, self.process = blocks, process
        self.everyone = [rank for block in blocks for rank in block]

    def rows(self, x: Tensor, ids: Any) -> Tensor:
        matrix = communicate._meet("all_gather", x.contiguous())[0]
        return matrix[[self.everyone.index(i) for i in ids]]

    def reduce(self, x: Tensor, ids: Any, op: str, weights: Tensor | None = None, everywhere: bool = True) -> Tensor:
        return Wire(list(ids)).reduce(self.rows(x, ids), ids, op, weights)


def _mix_blocks(strategy: Any, blocks: list[list[int]], nodes: int, steps: int) -> Tensor:
    """Run a strategy with random local steps on rows placed in `blocks`, and return all parameters, (N, P)."""
    model, _ = small_problem()
    everyone = [rank for block in blocks for rank in block]
    run = Run(nodes, 0, steps, torch.full((nodes,), 64).numpy(), 8)
    fleets = []
    for k, ranks in enumerate(blocks):
        wire = _MeetingWire(blocks, k) if len(blocks) > 1 else None
        fleets.append(Fleet(model, ranks, nodes, CPU, wire))
    copies = [copy.deepcopy(strategy) for _ in blocks]

    @torch.no_grad()
    def program(k: int) -> None:
        fleet, mine = fleets[k], copies[k]
        acting = mine.on(fleet, run)
        for step in range(1, steps + 1):
            for row, rank in enumerate(fleet.ranks):
                for b, block in enumerate(fleet.blocks):
                    noise = torch.randn(block.layout.numel, generator=generator(0, "local", rank, step, b))
                    if mine.needs_gradients:
                        block.own_grads()[row] = noise
                    else:
                        block.params[row].add_(noise.to(block.params), alpha=0.1)
            if mine.needs_gradients:
                acting.transform_gradients(step, 0.1)
                for block in fleet.blocks:
                    assert block.grads is not None
                    block.params.sub_(block.grads, alpha=0.1)
            if acting.seeing:
                losses = [1 + torch.rand(1, generator=generator(0, "loss", rank, step)) for rank in fleet.ranks]
                acting.see_losses(step - 1, torch.stack(losses))
            acting.communicate(step)

    if len(blocks) == 1:
        program(0)
        return torch.cat([block.params for block in fleets[0].blocks], 1)

    rows = [[everyone.index(rank) for rank in ranks] for ranks in blocks]
    meeting = Meeting(Communicator(everyone, nodes), lambda _: None, lambda _: None, rows)
    try:
        meeting.run([functools.partial(program, k) for k in range(len(blocks))])
    finally:
        meeting.close()
    return torch.cat([torch.cat([fleet.blocks[b].params for fleet in fleets]) for b in range(len(fleets[0].blocks))], 1)
