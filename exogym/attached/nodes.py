"""Attach a strategy to a user's training loop: this process is one node, and the loop computes its gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.attached.checking import check_model, check_optimizer, check_strategy
from exogym.attached.loading import NodeLoader, stream_of_node
from exogym.attached.node import Node, abandon_others
from exogym.core.base.modes import normalizes
from exogym.core.base.rng import preserved_state
from exogym.core.progress import warn
from exogym.core.record.history import History
from exogym.data.single import single
from exogym.data.stream import UNKNOWN
from exogym.errors import ArgumentError, checked


@checked
def attach(
    model: nn.Module,
    optimizer: Optimizer | None,
    strategy: Any,
    *,
    total_steps: int | None = None,
    seed: int = 0,
    node: Any = None,
) -> Nodes:
    """Turn this process into a node that trains with `strategy` in your own training loop.

    Under `python -m exogym.launch`, torchrun, SLURM or Ray, each process is a node, and all processes call `attach`
    together. A script that was started without a launcher is a single node. All nodes start with node 0's model.

    After this call, the model's parameters are views of the node's row. The loop computes gradients as before and calls
    `Nodes.step()` instead of `optimizer.step()`. With the same batches and optimizer, the result is bitwise identical
    to `LocalTrainer.fit(strategy)`.

    If an earlier run with this model or optimizer was interrupted before `Nodes.finish`, `attach` ends that run: it
    clears the gradients and keeps the parameters and the optimizer's state.

    Args:
        model: the model on its device, not wrapped in DDP or FSDP.
        optimizer: the torch optimizer of the model's parameters that takes the steps. None: the strategy's inner
            optimizer takes them.
        strategy: as for `fit`. If you pass an `optimizer`, the strategy's `max_norm`, `lr_scheduler` and `warmup_steps`
            apply to it, and anything else that the strategy says about the inner optimizer must agree with it.
        total_steps: the run's length in optimizer steps. Only schedules over the run and some strategies need it.
        seed: seed of all random numbers of the strategy, `Nodes.loader` and `Nodes.reseed`.
        node: this node's processes, if a node consists of several processes over which `fully_shard` divides the model:
            the torch device mesh that `fully_shard` got, or its process group. Every node needs the same number of
            consecutive processes. The result is bitwise identical to `fit(strategy, node=NodeMesh(shard=k))` in the
            same processes.

    Raises:
        ArgumentError: an argument is wrong, or the strategy or optimizer can't be used in a user's loop.
        ModelError: the model can't be a row: it is on several devices, has no trainable parameter, or is divided over a
            node's processes in another way than `fully_shard` does it.

    >>> import torch
    >>> from exogym.strategy import DiLoCoStrategy
    >>> from exogym.testing import small_problem
    >>> model, data = small_problem()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> nodes = attach(model, optimizer, DiLoCoStrategy(H=2))
    >>> for x, y in nodes.loader(data, batch_size=16):
    ...     nn.functional.mse_loss(model(x), y).backward()
    ...     nodes.step()
    >>> model = nodes.finish()
    >>> nodes.step_count, nodes.history.last["tx_bytes"]
    (16, 0.0)
    """
    device = check_model(model, node is not None)
    check_strategy(strategy, total_steps, node is not None)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed={seed!r} must be a whole number")
    if optimizer is not None:
        check_optimizer(optimizer, strategy, model, node is not None)
    abandon_others(model, optimizer)
    return Nodes(Node(model, optimizer, strategy, device, total_steps, seed, node))


class Nodes:
    """One node of a run with the user's training loop. `attach` returns this object.

    All processes must call `step` (or the optimizer's step after `follow_optimizer`) equally often, and `finish`,
    `model_of` and `evaluating` together.

    Attributes:
        rank: the node's number, from 0.
        num_nodes: N, the number of nodes.
        part, parts: this process's number in its node, from 0, and the number of processes in the node.
        is_over: whether the run was ended by `finish` or by a later `attach` with this model or optimizer.

    >>> from torch import nn
    >>> from exogym.strategy import SimpleReduceStrategy
    >>> model = nn.Linear(2, 1)
    >>> nodes: Nodes = attach(model, None, SimpleReduceStrategy("sgd", lr=0.1))
    >>> nodes
    <Nodes: node 0 of 1, step 0, SimpleReduceStrategy(inner_optim='sgd', lr=0.1)>
    """

    def __init__(self, node: Node):
        self._node, self.rank, self.num_nodes = node, node.wire.ranks[0], len(node.wire.placement)
        self.part, self.parts = node.part, node.wire.devices.parts
        self._is_finished = False

    @property
    def is_over(self) -> bool:
        return self._is_finished or self._node.is_abandoned

    def __repr__(self) -> str:
        part = f"process {self.part} of {self.parts}, " if self.parts > 1 else ""
        return f"<Nodes: {part}node {self.rank} of {self.num_nodes}, step {self.step_count}, {self._node.strategy!r}>"

    @property
    def step_count(self) -> int:
        """The number of steps that the node has taken."""
        return self._node.step

    @property
    def history(self) -> History:
        """The records so far: bytes, learning rates, and the losses that were passed to `step`.

        Records are added at the end of each stretch, so the last record is from the last synchronization.
        """
        return self._node.history

    # Data and randomness

    @checked
    def loader(
        self,
        dataset: Any,
        batch_size: int = 32,
        *,
        gradient_accumulation: int = 1,
        shuffle: bool = True,
        partitioner: Any = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> NodeLoader:
        """Return this node's batches of `dataset`, distributed to the nodes as by `LocalTrainer.fit`.

        An iteration yields one epoch, from the node's current step on. If `gradient_accumulation > 1`, an item is the
        list of the step's batches, and a batch's share of the loss is its share of the step's examples. The arguments
        are the same as in `fit`. In a node of several processes, `batch_size` counts the node's examples, and each
        process gets an equal part.

        Raises:
            ArgumentError: an argument is wrong, or the node's processes can't share its batches evenly; or training has
                begun without this data set, which the strategy needs to weight nodes by their numbers of examples.
            DataError: `dataset` cannot be used.

        Warns if the node's batch normalization would get a single example, for example at the end of an epoch.
        """
        stream = stream_of_node(
            dataset, self._node.strategy, self.num_nodes, self._node.seed, parts=self.parts, batch_size=batch_size,
            gradient_accumulation=gradient_accumulation, shuffle=shuffle, partitioner=partitioner,
            dataloader_kwargs=dataloader_kwargs,
        )  # fmt: skip
        self._node.take_stream(stream)
        if self.parts == 1 and normalizes(self._node.model):
            micro = batch_size if gradient_accumulation > 1 else None
            if (said := single(stream, [self.rank], self._node.total_steps or UNKNOWN, micro)) is not None:
                warn(f"batch normalization cannot train on 1 example, unless it has several positions: {said}")
        share = (self.part, self.parts)
        return NodeLoader(stream, self.rank, gradient_accumulation, lambda: self.step_count, share)

    def reseed(self) -> None:
        """Seed torch, numpy and Python for this node's next step, as `fit` does before each step.

        If the model draws random numbers and the result must be bitwise identical to `fit`, call it before the forward
        pass of a step, or of the step's first micro-batch. Otherwise the loop's own random state is used.
        """
        self._node.worker.reseed(self.rank, self.step_count)

    # Steps

    def step(self, loss: Tensor | float | None = None) -> None:
        """Take the node's step. Call it after `backward()`, instead of `optimizer.step()`.

        A step applies the strategy's gradient modules, clips to `max_norm`, takes the optimizer's step, does the
        strategy's part after the step, and sets `.grad` of all parameters to None. It reads other nodes' parameters and
        gradients only where the strategy communicates.

        Args:
            loss: this step's loss, for the history.

        Raises:
            ArgumentError: the run is over or has taken its `total_steps` steps; the loss is not a single number; or a
                torch scheduler changes the learning rate although the strategy has a schedule.
            ModelError: no parameter has a gradient, or a parameter was replaced or moved.
            TrainingError: a gradient, an update or a loss is not finite; or another node's loop has ended.
        """
        self._check_open()
        if self._node.users is not None and self._node.users.follows:
            raise ArgumentError(
                "nodes.step() was called after nodes.follow_optimizer(), which lets the optimizer's step() take the "
                "node's step: remove the call of nodes.step()"
            )
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ArgumentError(
                f"loss must be a single number, but has the shape {tuple(loss.shape)}: pass its mean to nodes.step"
            )
        self._node.before_step(loss)
        self._node.optimizer_step()
        self._node.after_step()

    def follow_optimizer(self) -> None:
        """Let each `optimizer.step()` take the node's step. Use it if another trainer calls `optimizer.step()`.

        Torch's optimizer hooks then do the work of `step` before and after the optimizer's own step. A closure, as in
        `optimizer.step(closure)`, computes the gradients first. Call this method once, before training.

        Raises:
            ArgumentError: `attach` got optimizer=None.
        """
        self._check_open()
        users = self._node.users
        if users is None:
            raise ArgumentError("follow_optimizer needs an optimizer, but attach got optimizer=None")

        def before() -> None:
            self._check_open()
            self._node.before_step()
            users.prepare(0, clip=not self._node.driver.algorithm.needs_gradients)

        def after() -> None:
            users.clear()
            self._node.after_step()

        users.follow(before, after)

    # Results

    def model_of(self, node: int | None = None) -> nn.Module:
        """Return a copy of the model with the averaged (or outer) parameters and buffers, or with node `node`'s.

        All processes call this method together. Its bytes are not counted.

        Raises:
            ArgumentError: the node does not exist, or the model is sharded over the node's processes.
        """
        self._check_node("model_of", node)
        if self._node.shards is not None:
            raise ArgumentError(
                "model_of: torch can't copy a model that fully_shard has divided. Use `with nodes.evaluating():`, in "
                "which your own model has the averaged parameters"
            )
        with preserved_state(self._node.device):  # the loop's random state
            copied = copy.deepcopy(self._node.model)
            if not self.is_over:
                self._node.put_into(copied, node)
        for p in copied.parameters():
            p.grad = None
        return copied

    @contextlib.contextmanager
    def evaluating(self, node: int | None = None) -> Iterator[nn.Module]:
        """A context in which the model has the averaged (or outer) parameters and buffers, or node `node`'s.

        Inside, the model is in evaluation mode and computes no gradients. Afterward, it has its own parameters and mode
        again. All processes enter the context together, between two steps. Its bytes are not counted.

        Raises:
            ArgumentError: the node does not exist, or the run is over.
            ModelError: the model holds gradients of an unfinished step.

        >>> from exogym.strategy import DiLoCoStrategy
        >>> nodes = attach(nn.Linear(2, 1), None, DiLoCoStrategy(H=2))
        >>> with nodes.evaluating() as model:
        ...     print(model.training)
        False
        """
        self._check_open()
        self._check_node("evaluating", node)
        with self._node.showing(node) as model:
            yield model

    def finish(self) -> nn.Module:
        """End the run: synchronize the last steps, and return the model with the parameters that `fit` would return.

        The parameters are ordinary tensors again. Each process has the same final model, or its part of it in a node of
        several processes.

        Raises:
            TrainingError: the final model is not finite, or another node has taken more or fewer steps.
        """
        self._check_open()
        self._node.finish()
        self._is_finished = True
        return self._node.model

    def state_dict(self) -> dict[str, Any]:
        """Return the node's state for `torch.save`: its parameters and buffers, the strategy's state and the history.

        Each process saves its own state, also in a node of several processes. If you passed an optimizer to `attach`,
        save the optimizer's state as well. Tensors are not copied and share memory with the model's `state_dict`, so a
        file with both is no larger.

        Raises:
            ArgumentError: the run is over.
        """
        self._check_open()
        return self._node.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` that `state_dict` returned in a run with the same nodes and strategy.

        Raises:
            CheckpointError: `state` belongs to another node or another run.
        """
        self._check_open()
        self._node.load_state_dict(state)

    def _check_node(self, method: str, node: int | None) -> None:
        if node is not None and (isinstance(node, bool) or node not in range(self.num_nodes)):
            last = self.num_nodes - 1
            raise ArgumentError(f"{method}({node!r}): pass None for the averaged model, or a node from 0 to {last}")

    def _check_open(self) -> None:
        if self._node.is_abandoned:
            raise ArgumentError(
                "the run is over, because attach was called again with its model or optimizer: use the Nodes that "
                "the later call returned"
            )
        if self.is_over:
            raise ArgumentError("the run is over, because nodes.finish() was called: attach again for another run")
