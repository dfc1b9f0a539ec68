"""Run a strategy's modules on a fleet, and decide when each module acts.

Code for changed updates (`updates`), a tuner (`tuning`), and nodes that several processes hold (`Dealing`) runs only if
the run has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from exogym.core.combinations import check
from exogym.core.fleet import Fleet
from exogym.core.fleet.dealing import Dealing
from exogym.core.fleet.presence import take_rows
from exogym.core.fleet.state import Shared, Tensors
from exogym.strategy.averaging import Averaging
from exogym.strategy.capabilities import Clients, HasOuterModel, SeesLosses
from exogym.strategy.modules import CommunicationModule, GradientModule, Module, known_traffic, named
from exogym.strategy.strategy import Inner, Run, clip_rows
from exogym.strategy.updates import Updates

NEVER = 2**62  # a step after all others


class Tuning(Protocol):
    """What changes an argument of the strategy during a run: a seam that a wrapper of the strategy fills."""

    name: str  # of the argument

    def features(self) -> dict[str, str]: ...
    def start(self, composition: Composition, run: Run) -> None:
        """Prepare for a run, before training, and register its state with the fleet."""

    def before_meeting(self, acting: Sequence[int]) -> None:
        """Called right before the communication modules with the numbers `acting` act."""

    def after_meeting(self, acting: Sequence[int], step: int) -> None:
        """Called right after the communication modules with the numbers `acting` have acted, after `step`."""


class Composed(Protocol):
    """The attributes of a `CommunicateOptimizeStrategy` that a `Composition` uses."""

    inner: Inner
    averaging: Averaging
    communication_modules: list[CommunicationModule]
    gradient_modules: list[GradientModule]
    updates: Updates | None
    tuning: Tuning | None

    @property
    def modules(self) -> list[Module]: ...
    @property
    def clients(self) -> Clients: ...
    def features(self) -> dict[str, str]: ...


class Composition:
    """Runs the modules of a `CommunicateOptimizeStrategy` on a fleet, in one run.

    Raises:
        ArgumentError: the modules do not fit together in this run.
    """

    def __init__(self, strategy: Composed, fleet: Fleet, run: Run):
        self.strategy, self.fleet = strategy, fleet
        self.max_norm, self.clients = strategy.inner.max_norm, strategy.clients
        self.communications, self.gradients = strategy.communication_modules, strategy.gradient_modules
        self.modules, self.updates, self.tuning = strategy.modules, strategy.updates, strategy.tuning
        self.seeing = [module for module in self.communications if isinstance(module, SeesLosses)]
        self.last_events = [0] * len(self.communications)
        self._dealings: dict[str, Dealing] = {}
        fleet.state.register("strategy", Shared(self._events, self._load_events))
        for name, module in named(self.modules).items():
            module.run = run
            with self._given(module) as given:
                if given is not None:
                    module.start(given, run)
                    fleet.state.register(name, module)
                    module.shared()  # fails now, not at the first checkpoint, if state cannot be saved
        weighs = any(getattr(module, "weights", None) is not None for module in self.modules)
        strategy.averaging.check_members(
            type(strategy).__name__, known_traffic(self.modules, run.num_nodes)[0], run.num_nodes
        )
        strategy.averaging.bind(fleet.comm, weighs, run.seed)
        if self.tuning is not None:
            self.tuning.start(self, run)
        if self.gradients and self.clients.local_steps(0, 1) is not None:
            check(strategy.features() | {"nodes that rest": "a communication module that lets nodes rest"})

    def next_event(self, step: int) -> int:
        """Return the first step after `step` at which a module must act."""
        if self.gradients:
            return step + 1
        return min((module.next_event(step) for module in self.communications), default=NEVER)

    def is_event(self, step: int) -> bool:
        """Return whether a communication module acts after `step`."""
        return any(module.next_event(step - 1) == step for module in self.communications)

    def transform_gradients(self, step: int, lr: float) -> None:
        """Rewrite and clip the gradients of all rows before the inner step `step`."""
        fleet = self.fleet
        if not fleet.comm.present:
            return
        clip_first = any(module.clip_first for module in self.gradients)
        if clip_first:
            self._clip()
        if self.updates is not None and self.gradients:
            self.updates.before_gradients(fleet, step)
        for module in self.gradients:
            with self._given(module, gradients=True) as given:
                if given is not None:
                    module.transform(given, step, lr)
        if not clip_first:
            self._clip()

    def see_losses(self, first: int, losses: Tensor) -> None:
        """Show the modules the rows' losses (rows, steps) of the steps after step `first`."""
        for module in self.seeing:
            module.see_losses(self.fleet, first, losses)

    def communicate(self, step: int) -> bool:
        """Run the communication modules that act after `step`. Return whether inner optimizers must start afresh."""
        fleet = self.fleet
        if not fleet.comm.present and not self.clients.asks_clients:
            return False
        acting = [m for m, module in enumerate(self.communications) if module.next_event(step - 1) == step]
        with self._around(acting, step):
            for m in acting:
                with self._given(self.communications[m]) as given:
                    if given is not None:
                        self.communications[m].communicate(given, step)
                self.last_events[m] = step
        return any(self.communications[m].fresh_inner_state for m in acting)

    def _send(self, acting: Sequence[int], step: int) -> bool:
        return any(self.communications[m].sends_parameters(step) for m in acting)

    @contextlib.contextmanager
    def _around(self, acting: Sequence[int], step: int) -> Iterator[None]:
        """Do the work before and after a meeting: changed updates, the tuner."""
        fleet, updates, tuning = self.fleet, self.updates if acting else None, self.tuning
        if updates is not None and self._send(acting, step):
            updates.before_parameters(fleet, step)
        if tuning is not None:
            tuning.before_meeting(acting)
        yield
        if updates is not None:
            updates.after_meeting(fleet)
        if tuning is not None:
            tuning.after_meeting(acting, step)

    def bring_back(
        self, nodes: Sequence[int], source: int, step: int, forget: bool = False, outer: list[Tensor] | None = None
    ) -> bool:
        """Prepare `nodes`, which were absent at step `step - 1`, to take part in step `step`.

        The nodes take the parameters `outer`, by default `consensus()`; without outer parameters, they take the
        parameters of node `source`. They take the buffers of `source`, and each module repairs its own state of these
        nodes. With `forget` the nodes also take the modules' state from `source`.

        `source` broadcasts a payload of P b bytes to `nodes`, for P parameters of b bytes; the bytes of buffers are
        counted apart.

        Returns:
            Whether the caller must also give the nodes the inner optimizer state of `source` and the fleet's step. This
            is needed with `forget`, or if gradients are averaged at every step, so that all nodes are equal again.
            Otherwise the nodes keep their inner optimizer states and step counts.
        """
        fleet, joining = self.fleet, list(nodes)
        if not forget:
            joining = self.clients.joining(joining, step)
        if joining:
            outer = self.consensus() if outer is None else outer
            for b, block in enumerate(fleet.blocks):
                take_rows(fleet, block.params, source, joining, None if outer is None else outer[b][None])
            with fleet.comm.counted_as("buffers"):
                for rows in fleet.buffers.values():
                    take_rows(fleet, rows, source, joining)
            for module in self.modules:
                with self._given(module) as given:
                    if given is not None:
                        for rows in module.row_state.values() if forget else ():
                            take_rows(given, rows, source, joining)
                        module.rejoin(given, joining, step)
        return bool(self.gradients) or forget

    def finish(self, step: int) -> None:
        """Let every communication module synchronize its last steps at the end of training."""
        if not self.fleet.comm.present and not self.clients.asks_clients:
            return
        unsent = [m for m, last in enumerate(self.last_events) if last < step]
        if self.updates is not None and len(unsent) == len(self.communications) and self._send(unsent, step):
            self.updates.before_parameters(self.fleet, step)
        for m, module in enumerate(self.communications):
            with self._given(module) as given:
                if given is not None:
                    module.finish(given, step, step - self.last_events[m])
            self.last_events[m] = step

    def consensus(self) -> list[Tensor] | None:
        """Return the outer parameters, (P,) per block, or None if the evaluation model is the mean of the rows."""
        for module in reversed(self.communications):
            if not isinstance(module, HasOuterModel):
                continue
            dealing = self._dealings.get(module.acts_on)
            if dealing is None:
                outer = module.consensus(self.fleet)
            else:
                outer = dealing.back(module.consensus(dealing.view) if dealing.is_here else None)
            if outer is not None:
                return outer
        return None

    def consensus_buffers(self) -> dict[str, Tensor] | None:
        """Return the evaluation model's buffers by name, or None if these are the mean of the rows' buffers."""
        shared = [module for module in reversed(self.communications) if isinstance(module, HasOuterModel)]
        found = (module.consensus_buffers(self.fleet) for module in shared)
        return next((buffers for buffers in found if buffers is not None), None)

    def _given(self, module: Module, gradients: bool = False) -> contextlib.AbstractContextManager[Fleet | None]:
        """Return the fleet on which a module acts; None if it has no work in this process of the node."""
        if self.fleet.comm.wire.columns.parts == 1 or module.acts_on == "elements":
            return contextlib.nullcontext(self.fleet)
        if module.acts_on not in self._dealings:
            self._dealings[module.acts_on] = Dealing(self.fleet, module.acts_on)
        return self._dealings[module.acts_on].acting(gradients)

    def _events(self) -> Tensors:
        return {"last_events": torch.tensor(self.last_events, dtype=torch.int64)}

    def _load_events(self, tensors: Tensors) -> None:
        self.last_events = tensors["last_events"].tolist()

    def _clip(self) -> None:
        if self.max_norm is None:
            return
        grads = []
        for block in self.fleet.blocks:
            assert block.grads is not None
            grads.append(block.grads[:1] if block.grads.stride(0) == 0 else block.grads)
        clip_rows(grads, self.max_norm, stacked=True, columns=self.fleet.comm.wire.columns)
