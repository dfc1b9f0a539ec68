"""A callback that looks at the averaged model, changes it in its own way, and has state: a mean over time."""

from typing import Any

import torch
from torch import Tensor

from exogym.callbacks import Callback, Running


class TimeAverage(Callback):
    """Average the averaged model's parameters exponentially, and evaluate the average at each evaluation."""

    steps, may_end = 1, False

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.vectors: list[Tensor] = []
        self.taken = -1  # the step of the last model

    def __call__(self, loop: Running) -> None:
        vectors, buffers = loop.average()
        if loop.step > max(0, self.taken):
            olds = [x.to(vectors[0].device) for x in self.vectors] or vectors
            self.vectors = [old.lerp(new, 1 - self.decay) for old, new in zip(olds, vectors, strict=True)]
            self.taken = loop.step
        if self.vectors and loop.evaluated_at == loop.step:
            values = loop.measure(self.vectors, buffers)
            loop.history.add_evaluation(loop.step, loop.epoch, {f"average_{name}": x for name, x in values.items()})

    def state(self) -> dict[str, Tensor]:
        return {f"{b}": x for b, x in enumerate(self.vectors)} | {"taken": torch.tensor(self.taken)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.taken = int(state.get("taken", -1))
        self.vectors = [state[f"{b}"] for b in range(len(state) - 1)]
