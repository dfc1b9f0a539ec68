"""Cut a model into pipeline stages, one per device of a node; processes pass activations on (`stages=`).

The model's code stays as it is. Each stage runs the model's own forward pass:

- Before the stage, the pass runs on tensors without numbers (torch's meta device), which takes almost no time.
- At the stage's first cut, the received activations replace the module's output.
- At the stage's last cut, the pass stops, and the output goes to the next stage. The last stage computes the loss.

torch (`torch.distributed.pipelining`) schedules the work by 1F1B (Narayanan et al., arXiv:2104.04473).

The first stage that uses a parameter stores it in its row. If a later stage also uses the parameter (a head tied to the
embedding), this stage receives the parameter from the first stage and returns the gradient. If shards divide a stage,
they gather its parameters once per step, for any number of micro-batches (`mesh.replicated`). torch's `fully_shard`
would gather in each micro-batch, and its hooks run only after a complete forward pass. For an evaluation each process
gathers the whole model.

Traffic: per micro-batch a process sends the activations of the cut after its stage, and gradients of the same size for
the cut before its stage. Per step a process sends the parameters that two stages share, and the parameters and
gradients that a stage's shards exchange.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from exogym.core.base import pulse
from exogym.core.base.batches import batch_examples, map_tensors
from exogym.errors import ModelError
from exogym.mesh import NodeMesh
from exogym.mesh.places import local_of
from exogym.mesh.replicated import Replicated
from exogym.mesh.split import Context, Loss, Part
from exogym.mesh.splits import stages_holding, stages_of
from exogym.mesh.torch_private import Hollow, hold_local
from exogym.mesh.wire import NodeColumns

MOST_SCHEDULES = 8  # schedules to keep, one for each set of batch shapes


class Staged(Replicated):
    """A `Split` in which each process of the node computes some layers.

    Raise ModelError if a parameter has no axis; a cut's output is not one tensor with an example per row, or later
    layers also use other tensors from before the cut; or the forward pass reads a tensor's numbers before the cut.
    """

    def __init__(self, model: nn.Module, mesh: NodeMesh, inside: NodeColumns, device: torch.device):
        device_of, self.cuts = stages_of(model, mesh)
        self._schedules: dict[tuple[Any, ...], Any] = {}
        self._buffers = {name: device_of(name) for name, _ in model.named_buffers()}
        super().__init__(model, mesh, inside, device, stages_holding(model, device_of))

    def keepers(self, buffer: str) -> range:
        each = self.size // self.mesh.depth
        return range(self._buffers[buffer] * each, (self._buffers[buffer] + 1) * each)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context with the whole model in each process. Each process then needs memory for all parameters."""
        self.refresh()
        kept = {k: local_of(handle).detach() for k, handle in enumerate(self.handles)}
        stages = range(self.mesh.depth)
        try:
            for these in self.kinds:
                of = [[k for k in these if self.first[k] == stage] for stage in stages]
                for k, told in self.hand_on("stages", kept, [of[self.at["stages"]] for _ in stages], of, these):
                    hold_local(self.handles[k], told)
            yield
        finally:
            for k, local in kept.items():
                hold_local(self.handles[k], local)
            self._let_go_of_gathered()

    def gradients(self) -> list[Tensor | None]:
        found = super().gradients()
        self._let_go_of_gathered()
        return found

    def _let_go_of_gathered(self) -> None:
        if self.mesh.shard > 1 and self.mesh.zero == 3:
            self.lose(self.here)

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        schedule, stage = self._schedule(loss, parts, context)
        stage.submod.begin(parts, loss, scale, context)
        order, losses = torch.arange(len(parts)), list[Tensor]()
        given = {"target": order, "losses": losses} if stage.is_last else {}
        first = (torch.zeros(len(parts), 1, device=self.device),) if stage.is_first else ()
        try:
            schedule.step(*first, micro=order, **given)
        except RuntimeError as error:  # torch wraps the model's error
            raise (error.__cause__ or error) from None
        pulse.step_taken()
        total = torch.zeros((), dtype=torch.float64)
        for x in losses:
            total += x.detach().double().cpu()
        return total / self.mesh.tensor

    def _schedule(self, loss: Loss, parts: Sequence[Part], context: Context) -> tuple[Any, Any]:
        """Return the schedule for micro-batches of these shapes, and this process's stage. Both are cached."""
        sizes = [batch_examples(part) for part, _ in parts]
        largest = parts[sizes.index(max(sizes))][0]
        shapes: list[Any] = []
        map_tensors(largest, lambda x: shapes.append((tuple(x.shape), x.dtype)))
        with context():
            kind = torch.get_autocast_dtype(self.device.type) if torch.is_autocast_enabled(self.device.type) else None
        key = (len(parts), kind, *shapes)
        if key in self._schedules:
            return self._schedules[key]
        if len(self._schedules) == MOST_SCHEDULES:  # each holds memory for what it sends and receives
            del self._schedules[next(iter(self._schedules))]
        between = self._between(loss, largest, max(sizes), context)
        k, last = self.at["stages"], len(self.cuts)
        group, held = self.devices["stages"].get_group(), [self.handles[k] for k in self.here]
        stage = pipelining.PipelineStage(
            _Stage(self, k, held), k, last + 1, self.device, group=group,
            input_args=between[k - 1] if k else torch.zeros(1, 1, device=self.device),
            output_args=between[k] if k < last else torch.zeros(1, device=self.device),
        )  # fmt: skip
        schedule = pipelining.Schedule1F1B(stage, len(parts), scale_grads=False, loss_fn=lambda out, target: out.sum())
        self._schedules[key] = schedule, stage
        return schedule, stage

    def _between(self, loss: Loss, part: Any, size: int, context: Context) -> list[Tensor]:
        """Return a tensor like the activations at each cut, found without computing."""
        found: dict[str, Any] = {}
        with contextlib.ExitStack() as undo:
            hollow = Hollow(self.model, watches=True)

            def note(name: str, module: nn.Module, given: Any, out: Any) -> Any:
                found[name] = out
                return hollow.cut(out, name) if isinstance(out, Tensor) else out

            for name in self.cuts:
                hook = self.model.get_submodule(name).register_forward_hook(functools.partial(note, name))
                undo.callback(hook.remove)
            undo.enter_context(torch.no_grad())
            undo.enter_context(context())
            undo.enter_context(hollow)
            loss(part)
        for name in self.cuts:
            out = found.get(name)
            if not isinstance(out, Tensor) or not out.dim() or len(out) != size:
                said = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
                raise ModelError(
                    f"the model is cut after {name!r}, which returns {said} for {size} examples, but must return one "
                    "tensor with a row per example: pass other cuts, NodeMesh(stages=PipelineParallel(stages=[...]))"
                )
        shapes = [(found[name].shape, found[name].dtype) for name in self.cuts]
        return [torch.zeros(shape, dtype=dtype, device=self.device, requires_grad=True) for shape, dtype in shapes]


class _Stage(nn.Module):
    """Stage `index`: compute a micro-batch from its first cut to its last; the last stage returns the loss, (1,)."""

    def __init__(self, staged: Staged, index: int, held: Sequence[nn.Parameter]):
        super().__init__()
        self.index, self._held = index, nn.ParameterList(held)
        self._staged = [staged]  # in a list, so that torch does not register it as a submodule

    def begin(self, parts: Sequence[Part], loss: Loss, scale: float, context: Context) -> None:
        self._parts, self._loss, self._scale, self._context = parts, loss, scale, context

    def forward(self, given: Tensor, micro: Tensor) -> Tensor:
        staged, index = self._staged[0], self.index
        part, share = self._parts[int(micro)]
        size, cuts = batch_examples(part), staged.cuts
        most = max(batch_examples(other) for other, _ in self._parts)
        pulse.beat()
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._context())
            if index < len(cuts):
                end = staged.model.get_submodule(cuts[index]).register_forward_hook(_reached)
                undo.callback(end.remove)
            if index:
                hollow = undo.enter_context(contextlib.ExitStack())
                hollow.enter_context(torch.no_grad())
                hollow.enter_context(Hollow(staged.model))

                def come(module: nn.Module, inputs: Any, out: Any) -> Tensor:
                    hollow.close()
                    return given[:size]

                start = staged.model.get_submodule(cuts[index - 1]).register_forward_hook(come)
                undo.callback(start.remove)
            try:
                value = self._loss(part)
            except _Reached as reached:
                out = reached.out
                return out if size == most else torch.cat([out, out.new_zeros(most - size, *out.shape[1:])])
        return (value * (share * self._scale)).reshape(1)


class _Reached(BaseException):
    """Raised at the end of a stage, with its output."""

    def __init__(self, out: Tensor):
        self.out = out


def _reached(module: nn.Module, inputs: Any, out: Tensor) -> None:
    raise _Reached(out)
