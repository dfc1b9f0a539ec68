"""Ready-made tasks: reproducible models, data that fit them, options that are checked, methods told apart."""

import copy
import dataclasses
import pickle
import random

import numpy as np
import pytest
import torch

from exogym.data import Stream
from exogym.errors import ArgumentError, DataError
from exogym.study.tasks import Task, load_task


@pytest.fixture(autouse=True)
def packages_only(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("EXOGYM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def cifar_file(folder) -> None:
    draw = np.random.default_rng(0)
    parts = {f"x_{p}": draw.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for p, n in (("train", 400), ("test", 10))}
    labels = {f"y_{p}": draw.integers(0, 10, n, dtype=np.uint8) for p, n in (("train", 400), ("test", 10))}
    np.savez(folder / "cifar10.npz", **parts, **labels)


@pytest.mark.parametrize("name", ["digits", "mnist", "shakespeare", "cifar10"])
def test_a_task_trains_from_a_seeded_model(name: str, tmp_path) -> None:
    cifar_file(tmp_path)
    task = load_task(name, tmp_path if name == "cifar10" else None)
    assert task.name == name and task.max_steps >= 30 * task.H
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    one, same, other = task.make_model(0), task.make_model(0), task.make_model(1)
    assert random.getstate() == states[0] and np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])

    stream = Stream(task.train, task.num_nodes, batch_size=task.batch_size, partitioner=task.partitioner)
    batch = next(iter(stream.batches(0, 0, 1)))
    assert len(batch[0]) == task.batch_size
    before = one(batch)["loss"]
    before.backward()
    with torch.no_grad():
        for p in one.parameters():
            p -= 0.01 * p.grad
    assert one(batch)["loss"] < before
    validation = Stream(task.val, 1, batch_size=64, shuffle=False)
    assert one(next(iter(validation.batches(0, 0, 1))))["loss"].isfinite()


def test_tasks_can_be_sent_to_other_processes() -> None:
    task = load_task("digits")
    copied = pickle.loads(pickle.dumps(task))
    assert torch.equal(next(copied.make_model(3).parameters()), next(task.make_model(3).parameters()))


def test_options_reach_the_model() -> None:
    assert load_task("digits", hidden=7).make_model().layers[0].out_features == 7
    task = load_task("shakespeare", block_size=16, n_layer=1, n_embd=32)
    assert task.train[0][0].shape == (16,) and len(task.make_model().blocks) == 1
    assert len(task.val) <= 512


def test_wrong_names_and_options_are_explained(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="did you mean 'digits'"):
        load_task("digit")
    with pytest.raises(ArgumentError, match="no argument 'hiden': did you mean 'hidden'"):
        load_task("digits", hiden=3)
    with pytest.raises(DataError, match="no package ships it"):
        load_task("cifar10")
    with pytest.raises(DataError, match=r"has no digits.npz"):
        load_task("digits", tmp_path)


OWN = """
from exogym.study.tasks import Task, digits_task
def make(data=None, hidden=8):
    return digits_task(data, hidden=hidden)
def nothing():
    return 3
"""


def test_a_task_of_ones_own_by_name(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tasks_here.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_task("own_tasks_here:make").make_model().layers[0].out_features == 8
    assert load_task("own_tasks_here:make", hidden=5).make_model().layers[0].out_features == 5
    with pytest.raises(DataError, match=r"has no digits.npz"):
        load_task("own_tasks_here:make", tmp_path)
    for text, message in {
        "own_task_there:make": "no module 'own_task_there'; use module:function",
        ":make": "use module:function",
        "own_tasks_here:mak": "did you mean 'make'",
        "own_tasks_here:nothing": "must return an exogym.tasks.Task, but returned int",
    }.items():
        with pytest.raises(ArgumentError, match=message):
            load_task(text)
    (tmp_path / "own_broken.py").write_text("import surely_not_installed")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_task("own_broken:make")


def final_loss(task: Task, method: str, seed: int, steps: int) -> float:
    """Validation loss of one node alone, of gradient averaging, or of averaging every H steps; by hand."""
    nodes = 1 if method == "single" else task.num_nodes
    partitioner = None if method == "single" else task.partitioner
    stream = Stream(task.train, nodes, batch_size=task.batch_size, seed=seed, partitioner=partitioner)
    models = [task.make_model(seed) for _ in range(nodes)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True) for model in models]
    for step in range(steps):
        for node, model in enumerate(models):
            optimizers[node].zero_grad(set_to_none=True)
            model(next(iter(stream.batches(node, step, 1))))["loss"].backward()
        for same in zip(*(model.parameters() for model in models), strict=True):
            if method == "ddp":
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if method == "average" and (step + 1) % task.H == 0:
            average(models)
    final = average(copy.deepcopy(models))
    with torch.no_grad():
        return float(final(task.val.tensors)["loss"])


@torch.no_grad()
def average(models: list[torch.nn.Module]) -> torch.nn.Module:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack(list(same)).mean(0)
        for p in same:
            p.copy_(mean)
    return models[0]


@pytest.mark.slow
def test_digits_tells_the_methods_apart() -> None:
    task = load_task("digits")
    loss = {m: np.mean([final_loss(task, m, seed, 800) for seed in (0, 1)]) for m in ("single", "average", "ddp")}
    assert loss["ddp"] < loss["average"] < loss["single"], loss
    assert loss["single"] > 1.25 * loss["ddp"] and loss["single"] < 0.5, loss  # clear, and learnt


def test_an_old_name_of_a_setting_is_answered_with_the_new_one() -> None:
    for old, new in (("steps", "max_steps"), ("nodes", "num_nodes")):
        with pytest.raises(ArgumentError, match=rf"Task\(\) has no argument '{old}': did you mean '{new}'"):
            dataclasses.replace(load_task("digits"), **{old: 5})
