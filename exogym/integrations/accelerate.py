"""Use a strategy in an Accelerate training loop, where each process is a node.

    node = ExoGymNode(DiLoCoStrategy(H=50, outer_lr=1.0, outer_momentum=0.0))  # before the Accelerator
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    nodes = node.attach(accelerator, model, optimizer)
    for batch in node.loader(dataset, batch_size=32): ...     # then backward() and optimizer.step() as before
    model = nodes.finish()

The node hides the launch from the `Accelerator`, so that it doesn't wrap the model in DDP or distribute the data, and
steps the scheduler once per step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from exogym.attached.nodes import Nodes
from exogym.core.base.files import check_regular
from exogym.errors import ArgumentError, checked
from exogym.integrations.dealing import MicroBatches
from exogym.integrations.joining import Adapter

__all__ = ["ExoGymNode"]


class ExoGymNode(Adapter):
    """Make this process a node in an Accelerate training loop.

    Create the node before the `Accelerator`. You keep your training loop: through torch's hooks, each
    `optimizer.step()` takes the node's step.

    Args:
        strategy: as for `exogym.attach`. If your loop has its own optimizer, don't describe an inner optimizer in the
            strategy.
        total_steps, seed: as for `exogym.attach`.

    Attributes:
        rank, num_nodes: the node's number, and the number of nodes.
        nodes: the attached `Nodes`, once `attach` was called.
    """

    def attach(self, accelerator: Any, model: Any, optimizer: Any) -> Nodes:
        """Attach the strategy to the prepared model and optimizer.

        After this call, `accelerator.save_state` also saves the node's state, and `accelerator.load_state` loads it.

        Raises:
            ArgumentError: the `Accelerator` would wrap the model or scale the loss, or was created before the node; or
                for one of the reasons that `exogym.attach` lists.
        """
        if accelerator.num_processes > 1 or accelerator.distributed_type.value != "NO":
            raise ArgumentError(
                f"the Accelerator has distributed_type={accelerator.distributed_type.value} with "
                f"{accelerator.num_processes} processes, and would wrap the model: create the ExoGymNode before the "
                "Accelerator, and use no plugin that splits the model"
            )
        if accelerator.mixed_precision not in ("no", "bf16"):
            raise ArgumentError(
                f"mixed_precision={accelerator.mixed_precision!r} with ExoGymNode: loss scaling would skip steps on "
                "single nodes; use 'bf16'"
            )
        self._parts = accelerator.gradient_accumulation_steps
        nodes = self._follow(model, getattr(optimizer, "optimizer", optimizer))
        accelerator.register_for_checkpointing(nodes)
        accelerator.register_save_state_pre_hook(self._claim)
        accelerator.register_load_state_pre_hook(partial(_load, model))
        return nodes

    @checked
    def loader(
        self, dataset: Any, batch_size: int = 32, *, shuffle: bool = True, partitioner: Any = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> MicroBatches:  # fmt: skip
        """Return this node's batches of `dataset`, one epoch per iteration. Call this method after `attach`.

        The arguments are the same as in `Nodes.loader`. A step consists of the `Accelerator`'s
        `gradient_accumulation_steps` batches. An iteration starts at the node's current step. It seeds torch, numpy and
        Python before each step's first batch, as `fit` does. In an epoch's short last step, whose batches may differ in
        size, each batch's gradients are weighted by its number of examples.

        Raises:
            ArgumentError: an argument is wrong, or nothing is attached.
            DataError: `dataset` cannot be used.
        """
        if self.nodes is None:
            raise ArgumentError("node.loader was called before node.attach: attach the model first")
        loader = self.nodes.loader(
            dataset, batch_size, gradient_accumulation=self._parts, shuffle=shuffle, partitioner=partitioner,
            dataloader_kwargs=dataloader_kwargs,
        )  # fmt: skip
        return MicroBatches(loader, self.nodes.reseed, self._before_batch)

    def _before_batch(self, weight: float) -> None:
        assert self.nodes is not None
        self._weight(weight, self.nodes._node.worker.parameters)

    def _claim(self, models: Any, weights: Any, output_dir: str) -> None:
        """Mark the folder as this node's. Raise ArgumentError if it holds another node's state."""
        mark = Path(output_dir) / "exogym-node.txt"
        try:
            with mark.open("x") as file:
                file.write(str(self.rank))
        except FileExistsError:
            if (owner := mark.read_text()) != str(self.rank):
                raise ArgumentError(
                    f"save_state({output_dir!r}): the folder holds the state of node {owner or 'another'}, and this "
                    f"is node {self.rank}: use one folder per node, such as f'{output_dir}/node-{{node.rank}}'"
                ) from None


def _load(model: nn.Module, models: list[nn.Module], input_dir: str) -> None:
    """Load the model in the Accelerator's place, because safetensors' `load_model` rejects views of a longer row."""
    file = Path(input_dir) / "model.safetensors"
    if len(models) == 1 and models[0] is model and file.exists():
        models.clear()
        check_regular(file)
        model.load_state_dict(load_file(file), strict=False)  # a file holds tied parameters only once
