"""Ready-made tasks: data, a model and settings that show differences between strategies after a short training.

>>> digits_task().name, load_task("digits", hidden=8).num_nodes, mnist_task(width=2).batch_size, shakespeare_task().H
('digits', 4, 8, 10)
>>> cifar10_task("nowhere.npz")
Traceback (most recent call last):
...
exogym.errors.DataError: ...
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from exogym.core.base import rng
from exogym.core.base.devices import CPU
from exogym.data import IID, Source, cifar10, digits, label_skew, mnist, shakespeare
from exogym.data.partition import partitioner_of
from exogym.data.stream import is_iterable
from exogym.errors import ArgumentError, check_choice, checked, nearest
from exogym.models import MLP, CharGPT, SmallCNN
from exogym.strategy.traffic import ModelSize


@dataclass(frozen=True)
class Task:
    """A model, its data and default options.

    Attributes:
        name, description: the task's name, and a text about it, for reports.
        origin: the place where ExoGym found the data.
        train, val: the data sets.
        build: a function that returns a model with weights drawn from torch's generator (see `make_model`).
        num_nodes, batch_size, max_steps: number of nodes, examples per node and step, steps of a run.
        inner_optim, lr, lr_scheduler, warmup_steps, max_norm: settings of every strategy's inner optimizer.
        H: inner steps between synchronizations, for strategies with rounds.
        outer_lr, outer_momentum: settings of DiLoCo's outer optimizer. None stands for the optimizer's default.
        partitioner: how the data are divided among the nodes, in the command line's form. None: the examples are
            distributed anew in each epoch.
        evaluates: a text that describes the examples that an evaluation uses; None: all of `val`.
        perplexity: True if exp(validation loss) is the perplexity of held-out text.
    """

    name: str
    description: str
    origin: str
    train: Dataset[Any]
    val: Dataset[Any]
    build: Callable[[], nn.Module]
    num_nodes: int
    batch_size: int
    max_steps: int
    lr: float
    H: int
    outer_lr: float | None = None
    outer_momentum: float | None = None
    inner_optim: str = "adamw"
    lr_scheduler: str = "constant"
    warmup_steps: int = 0
    max_norm: float | None = None
    partitioner: str | None = None
    evaluates: str | None = None
    perplexity: bool = False

    def make_model(self, seed: int = 0) -> nn.Module:
        """Return a new model with weights drawn from `seed`. The caller's random state does not change."""
        with rng.preserved_state(CPU):
            rng.seed_torch(rng.stream_seed(seed, "init"), CPU)
            return self.build()


Task.__init__ = checked(Task.__init__)  # type: ignore[method-assign]
Data = str | os.PathLike[str] | None


def size_of(task: Task) -> ModelSize:
    """Return the number of trainable parameters in a task's model, with their shapes.

    >>> int(size_of(load_task("digits")))
    2410
    """
    return ModelSize.of(p.shape for p in task.make_model().parameters() if p.requires_grad)


def skew_of(task: Task, num_nodes: int) -> float | None:
    """Return the label skew of a task's data among nodes, or None if it is unknown.

    >>> round(skew_of(load_task("digits"), 4), 2)
    0.29
    """
    if is_iterable(task.train):
        return None
    return label_skew(partitioner_of(task.partitioner or IID()), task.train, num_nodes)


def load_task(name: str, data: Data = None, **options: Any) -> Task:
    """Return a task: "digits", "mnist", "shakespeare", "cifar10", "whisper", "language", or "module:function".

    The function is called with `options`, and with `data` if given, and must return a `Task`.

    Args:
        data: file or folder with the data, if `exogym.data.sources` doesn't find them.
        options: the task's options: `hidden` (digits), `width` (mnist, cifar10), `block_size`, `n_layer`, `n_head`,
            `n_embd`, `dropout` (shakespeare); the options of `exogym.home.tasks.whisper_task` (whisper)
            or `language_task` (language).

    Raises:
        ArgumentError: the task, an option, the module or the function does not exist, or the function does not return a
            `Task`.
        DataError: the data were not found. The message says how to get them.

    >>> task = load_task("digits")
    >>> task.num_nodes, task.partitioner, sum(p.numel() for p in task.make_model(seed=0).parameters())
    (4, 'dirichlet:1.0', 2410)
    """
    if ":" in name:
        return _own_task(name, *(() if data is None else (data,)), **options)
    check_choice("task", name, _TASKS)
    if not isinstance(data, str | os.PathLike | None):
        raise ArgumentError(f"data={data!r} must be the path of a file or folder")
    found = _TASKS[name]
    return _own_task(found, data, **options) if isinstance(found, str) else found(data, **options)


def _own_task(name: str, *data: Data, **options: Any) -> Task:
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module_name.startswith(error.name or module_name):
            raise  # a module that it imports is missing
        raise ArgumentError(
            f"task {name!r}: there is no module {module_name!r}; use module:function, such as 'my_task:make' for the "
            "function make in my_task.py"
        ) from error
    make = getattr(module, function, None)
    if not callable(make):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ArgumentError(f"task {name!r}: {module_name} has no function {function!r}: {nearest(function, own)}")
    task = make(*data, **options)
    if not isinstance(task, Task):
        raise ArgumentError(
            f"task {name!r}: {function} must return an exogym.tasks.Task, but returned {type(task).__name__}"
        )
    return task


@checked
def digits_task(data: Data = None, *, hidden: int = 32) -> Task:
    """8x8 digits and an MLP with one hidden layer. After a few seconds, DDP, DiLoCo, FedAvg and `single` differ."""
    source = digits(data)
    return _task(
        "digits",
        f"8x8 handwritten digits, MLP 64-{hidden}-10",
        source,
        functools.partial(MLP, [64, hidden, 10]),
        batch_size=4,
        max_steps=1000,
        lr=2e-3,
        outer_lr=0.3,
        partitioner="dirichlet:1.0",
    )


@checked
def mnist_task(data: Data = None, *, width: int = 8) -> Task:
    """MNIST's 28x28 digits and a small convolutional network."""
    return _task(
        "mnist",
        f"28x28 handwritten digits, CNN of width {width}",
        mnist(data),
        functools.partial(SmallCNN, channels=1, size=28, width=width),
        batch_size=8,
        max_steps=300,
        lr=2e-3,
        outer_lr=0.4,
        partitioner="dirichlet:1.0",
    )


@checked
def cifar10_task(data: Data = None, *, width: int = 16) -> Task:
    """CIFAR-10's 32x32 photographs and a small convolutional network. You provide the data."""
    return _task(
        "cifar10",
        f"32x32 photographs of ten kinds, CNN of width {width}",
        cifar10(data),
        functools.partial(SmallCNN, channels=3, size=32, width=width),
        batch_size=16,
        max_steps=400,
        lr=1e-3,
        partitioner="dirichlet:1.0",
    )


@checked
def shakespeare_task(
    data: Data = None,
    *,
    block_size: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    n_embd: int = 64,
    dropout: float = 0.0,
) -> Task:
    """Shakespeare's text as characters, and a small GPT (0.1M parameters). A strategy takes about a minute on one core.

    Training windows overlap by half. About 512 validation windows are spread over the last tenth of the text.
    """
    if block_size < 2:
        raise ArgumentError(f"block_size={block_size!r} must be at least 2")
    source = shakespeare(data, block_size=block_size, stride=block_size // 2, val_windows=512)
    model = functools.partial(
        CharGPT, len(source.classes), block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=dropout
    )
    return _task(
        "shakespeare",
        f"Shakespeare by the character, GPT of {n_layer} layers, {n_head} heads, width {n_embd}",
        source,
        model,
        batch_size=8,
        max_steps=1000,
        lr=3e-3,
        outer_lr=0.4,
        lr_scheduler="cosine",
        warmup_steps=50,
        max_norm=1.0,
    )


def _task(name: str, description: str, source: Source, build: Callable[[], nn.Module], **settings: Any) -> Task:
    return Task(name, description, source.origin, source.train, source.val, build, num_nodes=4, H=10, **settings)


# A wing's task is named by its module and function, and loaded when a run needs it.
_TASKS: dict[str, Callable[..., Task] | str] = {
    "digits": digits_task,
    "mnist": mnist_task,
    "shakespeare": shakespeare_task,
    "cifar10": cifar10_task,
    "whisper": "exogym.home.tasks:whisper_task",
    "language": "exogym.home.tasks:language_task",
}
