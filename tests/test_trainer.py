"""`LocalTrainer.fit`: against plain loops, in every precision, and all that it reports."""

import functools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import exogym.core.progress
import exogym.core.training.choices
from exogym import LocalTrainer
from exogym.callbacks import EvaluateNodes, Every
from exogym.core.base.devices import Device
from exogym.core.compute.outputs import Output, accuracy
from exogym.core.record.rows import COLUMNS
from exogym.data.stream import Stream
from exogym.errors import ModelError
from exogym.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from exogym.testing import fingerprint, small_problem

BATCH = 8


def examples(count=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def fit(strategy, model=None, data=None, val=None, metrics=None, trainer_class=LocalTrainer, **options):
    trainer = trainer_class(
        network() if model is None else model,
        examples() if data is None else data,
        val,
        loss_fn=F.cross_entropy,
        metrics=metrics,
    )
    trainer.fit(strategy, **({"batch_size": BATCH, "device": "cpu"} | options))
    return trainer


def averaged(trainer, name):
    return [row[name] for row in trainer.history.rows(node=None)]


# Against plain loops


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    "optimizer",
    [OptimSpec("sgd", lr=0.1, momentum=0.9, nesterov=True), OptimSpec("adamw", lr=0.01), OptimSpec("adagrad", lr=0.1)],
    ids=str,
)
@pytest.mark.parametrize("strategy", [SimpleReduceStrategy, functools.partial(FedAvgStrategy, H=7)])
def test_one_node_is_a_plain_loop_bit_for_bit(strategy, optimizer, clip):
    """Torch's own cosine schedule and clipping; its fused kernel, which is the one ExoGym takes."""
    steps = 20
    model = network()
    torch_optimizer = optimizer.cls(model.parameters(), **optimizer.kwargs, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(torch_optimizer, steps)
    losses, rates = [], []
    for x, y in Stream(examples(60), 1, batch_size=BATCH, seed=3).batches(0, 0, steps):
        torch_optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        rates.append(torch_optimizer.param_groups[0]["lr"])
        torch_optimizer.step()
        schedule.step()
        losses.append(loss.item())

    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    trainer = fit(strategy(optimizer, lr_scheduler=cosine, max_norm=clip), data=examples(60), seed=3, max_steps=steps)
    # Behind a gradient average the norm is that of the whole row at once, not of the tensors' norms: rounding.
    exact = clip is None or strategy is not SimpleReduceStrategy
    for found, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else 1e-6)
    found = averaged(trainer, "train_loss")[1:]
    assert found == losses if exact else found == pytest.approx(losses, abs=1e-6)
    assert averaged(trainer, "lr")[1:] == pytest.approx(rates, rel=1e-12)

    # The same curve by name differs from torch's recursion by rounding only; the default kernel likewise.
    named = fit(strategy(optimizer, lr_scheduler="cosine", max_norm=clip), data=examples(60), seed=3, max_steps=steps)
    for found, expected in zip(named.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_short_last_batch_is_a_step_of_its_own():
    trainer = fit(SimpleReduceStrategy(lr=0.1), data=examples(20), num_epochs=2)
    assert averaged(trainer, "step") == list(range(7))  # 8 + 8 + 4 examples an epoch
    assert averaged(trainer, "epoch") == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "limits, steps", [({}, 4), ({"num_epochs": 3}, 12), ({"max_steps": 6}, 6), ({"num_epochs": 3, "max_steps": 5}, 5),
                      ({"num_epochs": 1, "max_steps": 50}, 4)]
)  # fmt: skip
def test_how_long_a_run_is(limits, steps):
    assert fit(SimpleReduceStrategy(), num_nodes=2, **limits).history[-1]["step"] == steps


# The batch in pieces, and precisions


STRATEGIES = {
    "ddp": lambda: SimpleReduceStrategy(OptimSpec("sgd", lr=0.1)),
    "local steps": lambda: FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=3),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "pieces", [{"batch_size": 5, "gradient_accumulation": 4}, {"batch_size": 20, "minibatch_size": 6},
               {"batch_size": 10, "gradient_accumulation": 2, "minibatch_size": 7}]
)  # fmt: skip
def test_a_batch_in_pieces_is_the_whole_batch(name, pieces):
    """Epochs of 33 examples for each node, so the last batch of each has 13: pieces of unequal size."""
    data = examples(66)
    whole = fit(STRATEGIES[name](), data=data, num_nodes=2, batch_size=20, max_steps=9)
    parts = fit(STRATEGIES[name](), data=data, num_nodes=2, max_steps=9, **pieces)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert averaged(parts, "train_loss")[1:] == pytest.approx(averaged(whole, "train_loss")[1:], abs=1e-6)


def test_pieces_are_really_computed_one_by_one():
    sizes = []
    model = network()
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])) if module.training else None)
    fit(SimpleReduceStrategy(), model=model, data=examples(20), batch_size=20, minibatch_size=8, max_steps=2)
    assert sizes[-6:] == [8, 8, 4] * 2


def test_max_memory_usage_finds_a_micro_batch_and_says_so(monkeypatch, capsys):
    """A machine on which 10 rows of fp32 parameters and the activations of a few examples fit."""
    row = sum(p.numel() for p in network().parameters()) * 4
    monkeypatch.setattr(Device, "total_bytes", lambda self: 10 * row)
    sizes = []
    model = network()
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])) if module.training else None)
    limited = {"batch_size": 64, "max_memory_usage": 0.9, "max_steps": 3}
    trainer = fit(STRATEGIES["ddp"](), model=model, **limited)
    found = trainer.description["chosen"]["micro_batch_size"]
    assert 1 <= found < 64 and set(sizes[-2:]) == {found}
    assert f"micro-batches of {found} examples fit" in capsys.readouterr().err
    whole = fit(STRATEGIES["ddp"](), batch_size=64, max_steps=3)
    for a, b in zip(whole.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    monkeypatch.setattr(Device, "total_bytes", lambda self: 4 * row)
    with pytest.raises(ValueError, match="one example needs"):
        fit(STRATEGIES["ddp"](), **limited)


class Recording(nn.Module):
    """Says which precision its first product had."""

    shared_attributes = ("dtypes",)

    def __init__(self):
        super().__init__()
        self.body, self.dtypes = network(), []

    def forward(self, x):
        y = self.body[0](x)
        self.dtypes.append(y.dtype)
        return self.body[2](self.body[1](y)).float()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "given, dtype", [({"precision": "bf16"}, torch.bfloat16), ({"autocast": True}, torch.bfloat16),
                     ({"precision": "fp16"}, torch.float16), ({}, torch.float32)]
)  # fmt: skip
def test_autocast_computes_in_the_precision_and_learns(name, given, dtype):
    model = Recording()
    trainer = fit(STRATEGIES[name](), model=model, num_nodes=2, max_steps=30, val=examples(32, seed=2), **given)
    assert set(model.dtypes) == {dtype}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    exact = fit(STRATEGIES[name](), num_nodes=2, max_steps=30, val=examples(32, seed=2))
    found, expected = averaged(trainer, "val_loss"), averaged(exact, "val_loss")
    assert found[-1] == pytest.approx(expected[-1], rel=0.02)
    assert found[-1] < 0.8 * found[0]


class Overflowing(nn.Module):
    """Gives node 1, whose data carry a mark, gradients that overflow in fp16 until the scale is small enough."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        y = self.out(x)
        return Boost.apply(y, 300.0) if bool((x[:, 0] == 9).any()) else y


class Boost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, factor):
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class ByHand(Strategy):
    def step(self):
        self.communicate_gradients()
        self.update_parameters()
        super().step()


def marked(rank, num_nodes, is_train):
    x, y = examples(32, seed=rank).tensors
    x = x.clone()
    x[:, 0] = 9 if rank == 1 else 0
    return TensorDataset(x, y)


def overflow_run(strategy, steps):
    seen = {}

    def look(loop):
        seen["rows"] = torch.cat([block.params.clone() for block in loop.fleet.blocks], 1)
        seen["scales"] = loop.worker.scaling.scales.copy()

    torch.manual_seed(0)
    fit(
        strategy, model=Overflowing(), data=marked, num_nodes=2, max_steps=steps, precision="fp16",
        callbacks=[Every(1, look)], final_sync=False,
    )  # fmt: skip
    return seen


def test_an_overflow_in_fp16_skips_that_node_alone_where_nodes_are_independent():
    torch.manual_seed(0)
    start = torch.nn.utils.parameters_to_vector(Overflowing().parameters()).detach()
    with pytest.warns(UserWarning, match="first communicates after"):
        seen = overflow_run(FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=50), steps=2)
    assert not torch.equal(seen["rows"][0], start) and torch.equal(seen["rows"][1], start)
    assert seen["scales"].tolist() == [65536.0, 16384.0]
    with pytest.warns(UserWarning, match="first communicates after"):
        seen = overflow_run(FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=50), steps=20)
    assert not torch.equal(seen["rows"][1], start) and seen["rows"].isfinite().all()
    assert seen["scales"][1] < 8192


def test_too_few_outer_steps_for_the_default_momentum_are_said_once_before_training(capfd, monkeypatch):
    monkeypatch.setattr(exogym.core.progress, "_printed", set())  # by tests before this one

    def said(strategy, steps, **options):
        model, data = small_problem()
        trainer = LocalTrainer(model, data, loss_fn=F.mse_loss)
        trainer.fit(strategy, num_nodes=2, max_steps=steps, batch_size=8, device="cpu", progress=False, **options)
        return capfd.readouterr().err

    few = said(DiLoCoStrategy(lr=0.01, H=4), 36)
    assert few == (
        "exogym: DiLoCoStrategy takes 9 outer steps in 36 steps, too few for the default outer_lr=0.7 and "
        "outer_momentum=0.9: momentum needs about 10. In a short run, as in fine-tuning, pass outer_lr=1.0, "
        "outer_momentum=0.0, or use H=3 for 10 outer steps\n"
    )
    assert not said(DiLoCoStrategy(lr=0.01, H=4), 36)  # of the same length, as the seeds of a comparison
    assert not said(DiLoCoStrategy(lr=0.01, H=3), 30)  # as the line says
    assert not said(DiLoCoStrategy(lr=0.01, H=4, outer_lr=1.0, outer_momentum=0.0), 36)
    assert not said(DiLoCoStrategy(lr=0.01, H=4, outer_momentum=0.9), 36)  # somebody chose it
    assert not said(FedAvgStrategy(lr=0.01, H=4), 8)
    assert "takes 1 outer step in 8 steps" in said(StreamingDiLoCoStrategy(lr=0.01, H=8), 8)


DECAYING = OptimSpec("sgd", lr=0.1, weight_decay=0.1)  # a step without gradient would show


@pytest.mark.parametrize("strategy", [SimpleReduceStrategy, ByHand])
def test_an_overflow_in_fp16_skips_all_nodes_together_in_ddp(strategy):
    torch.manual_seed(0)
    start = torch.nn.utils.parameters_to_vector(Overflowing().parameters()).detach()
    seen = overflow_run(strategy(DECAYING), steps=2)
    assert torch.equal(seen["rows"], start.expand(2, -1)) and seen["scales"].tolist() == [16384.0] * 2
    seen = overflow_run(strategy(DECAYING), steps=20)
    assert torch.equal(seen["rows"][0], seen["rows"][1]) and not torch.equal(seen["rows"][0], start)


def test_fp16_is_torchs_gradient_scaler():
    """One node, gradients that do not overflow: the same weights as torch's GradScaler on the CPU, to 1e-6."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in Stream(examples(), 1, batch_size=BATCH).batches(0, 0, 10):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    trainer = fit(STRATEGIES["ddp"](), precision="fp16", max_steps=10)
    for a, b in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# Evaluation and history


def test_the_history_has_the_pinned_keys_and_meanings():
    nodes, steps = 3, 10
    trainer = fit(FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=4), num_nodes=nodes, max_steps=steps, val=examples(20, 1))
    rows = list(trainer.history)
    assert set(COLUMNS) <= set(rows[0]) and all(row.keys() == rows[0].keys() for row in rows)
    start = rows[0]
    assert (start["step"], start["node"], start["train_loss"], start["tx_bytes"]) == (0, None, None, 0.0)
    assert start["val_loss"] > 0 and 0 <= start["val_accuracy"] <= 1
    assert start["consensus_distance"] == pytest.approx(0, abs=1e-6)
    for step in range(1, steps + 1):
        of_step = [row for row in rows if row["step"] == step]
        assert [row["node"] for row in of_step] == [None, 0, 1, 2]
        assert of_step[0]["train_loss"] == pytest.approx(np.mean([row["train_loss"] for row in of_step[1:]]), rel=1e-6)
    payload = 4 * sum(p.numel() for p in network().parameters())
    by_step = averaged(trainer, "payload_bytes")
    assert by_step == [payload * (step // 4) for step in range(steps)] + [3 * payload]  # the last: final_sync
    assert averaged(trainer, "tx_bytes")[-1] == pytest.approx(3 * payload * 2 * (nodes - 1) / nodes)
    evaluated = [row["step"] for row in rows if row["val_loss"] is not None]
    assert evaluated == [0, 3, 6, 9, 10]  # 64 examples, 3 nodes, batches of 8: epochs of 3 steps
    apart, after = (
        {row["step"]: row[name] for row in rows if row["node"] is None}
        for name in ("consensus_distance", "consensus_distance_after")
    )
    assert apart[3] == after[3] > 0 and apart[10] > 0 and after[10] == pytest.approx(0, abs=1e-6)  # synchronised there
    walls = averaged(trainer, "wall_s")
    assert walls == sorted(walls) and walls[0] >= 0


def test_the_averaged_model_is_evaluated_on_the_whole_set():
    val = examples(300, seed=4)  # more than one batch of evaluation, the last one short
    trainer = fit(FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=4), num_nodes=3, max_steps=8, val=val)
    x, y = val.tensors
    with torch.no_grad():
        logits = trainer.model(x)
    last = trainer.history[-4]
    assert last["node"] is None
    assert last["val_loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-6)
    assert last["val_accuracy"] == pytest.approx((logits.argmax(1) == y).float().mean().item(), rel=1e-6)
    few = fit(SimpleReduceStrategy(), val=val, val_size=30, max_steps=1)
    start = few.history[0]
    with torch.no_grad():
        assert start["val_loss"] == pytest.approx(F.cross_entropy(network()(x[:30]), y[:30]).item(), rel=1e-6)


def test_the_outer_model_is_evaluated_where_there_is_one():
    val = examples(50, seed=4)
    seen = {}

    def look(loop):
        if loop.step == 6:
            theta = loop.driver.algorithm.strategy.communication_modules[0].theta[0][0].clone()
            seen["theta"], seen["mean"] = theta, loop.fleet.average()[0]
            seen["row"] = next(iter(loop.history.rows_after(5, node=None)))

    fit(DiLoCoStrategy("sgd", H=4, lr=0.1), num_nodes=2, max_steps=8, val=val, val_interval=3, callbacks=[look])
    model = network()

    def loss_at(vector):
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        with torch.no_grad():
            return F.cross_entropy(model(val.tensors[0]), val.tensors[1]).item()

    assert seen["row"]["val_loss"] == pytest.approx(loss_at(seen["theta"]), rel=1e-5)
    assert loss_at(seen["mean"]) != pytest.approx(loss_at(seen["theta"]), rel=1e-3)


@pytest.mark.parametrize(
    "shape, targets",
    [((4, 3), (4,)), ((4, 5, 3), (4, 5)), ((4, 3, 5), (4, 5)), ((4, 3, 6, 5), (4, 6, 5)), ((4, 3, 3, 3), (4, 3, 3)),
     ((4, 6, 5, 3), (4, 6, 5))],
)  # fmt: skip
def test_accuracy_finds_the_axis_of_the_classes(shape, targets):
    y = torch.randint(0, 3, targets, generator=torch.Generator().manual_seed(0))
    axis = len(shape) - 1 if shape[:-1] == targets and shape != (4, 3, 3, 3) else 1
    logits = F.one_hot(y, 3).float().movedim(-1, axis)
    assert logits.shape == shape
    assert accuracy(Output(torch.zeros(()), logits, y)) == (y.numel(), y.numel())
    assert accuracy(Output(torch.zeros(()), -logits, y))[0] == 0
    y[0] = -100  # ignored by cross_entropy
    assert accuracy(Output(torch.zeros(()), logits, y)) == (y.numel() * 3 // 4, y.numel() * 3 // 4)


@pytest.mark.parametrize(
    "predictions, targets",
    [(torch.zeros(4, 1), torch.ones(4).long()), (torch.zeros(4), torch.ones(4).long()), (torch.zeros(4, 2), None),
     (torch.zeros(4, 2), torch.zeros(4)), (torch.zeros(4, 2), torch.zeros(5).long())],
)  # fmt: skip
def test_no_accuracy_where_there_are_no_classes(predictions, targets):
    assert accuracy(Output(torch.zeros(()), predictions, targets)) is None


def test_metrics_of_the_trainer_and_of_the_model():
    class Reporting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, batch):
            x, y = batch
            logits = self.body(x)
            return {
                "loss": F.cross_entropy(logits, y),
                "logits": logits,
                "confidence": logits.softmax(1).amax(1).mean(),
            }

    val = examples(300, seed=3)
    model = Reporting()
    error = {"error": lambda p, y: (p.argmax(1) != y).float().mean()}
    trainer = LocalTrainer(model, examples(), val, metrics=error)
    trainer.fit(SimpleReduceStrategy(), max_steps=2, batch_size=BATCH, device="cpu")
    last = next(trainer.history.rows_after(1, node=None))
    with torch.no_grad():
        logits = model.body(val.tensors[0])
    right = (logits.argmax(1) == val.tensors[1]).float().mean().item()
    assert last["val_accuracy"] == pytest.approx(right) and last["val_error"] == pytest.approx(1 - right)
    assert last["val_confidence"] == pytest.approx(logits.softmax(1).amax(1).mean().item(), rel=1e-6)


def test_a_factory_may_give_the_validation_set_and_is_told_so():
    asked = []

    def factory(rank, num_nodes, is_train):
        asked.append((rank, num_nodes, is_train))
        return examples(16 if is_train else 5 * (rank + 1), seed=rank + 10 * is_train)

    trainer = fit(SimpleReduceStrategy(), data=factory, val=factory, num_nodes=2, max_steps=1)
    assert asked == [(0, 2, True), (1, 2, True), (0, 2, False), (1, 2, False)]
    parts = [examples(5, seed=0), examples(10, seed=1)]
    x, y = (torch.cat([part.tensors[k] for part in parts]) for k in (0, 1))
    with torch.no_grad():
        expected = F.cross_entropy(trainer.model(x), y).item()
    assert trainer.history[-3]["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_the_validation_set_is_collated_as_the_training_set_is():
    rows = [{"pixels": x.tolist(), "label": int(y)} for x, y in examples(20)]

    def collate(batch):
        return torch.tensor([row["pixels"] for row in batch]), torch.tensor([row["label"] for row in batch])

    trainer = fit(SimpleReduceStrategy(), data=rows, val=rows, max_steps=2, dataloader_kwargs={"collate_fn": collate})
    plain = fit(SimpleReduceStrategy(), data=examples(20), val=examples(20), max_steps=2)
    assert averaged(trainer, "val_loss") == averaged(plain, "val_loss")


# Callbacks


def test_evaluate_nodes_adds_a_row_for_each_node_at_each_evaluation():
    val = examples(40, seed=2)
    seen = {}

    def look(loop):
        seen[loop.step] = loop.fleet.blocks[0].params.clone()

    trainer = fit(
        FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=4), num_nodes=2, max_steps=8, val=val, val_interval=3,
        callbacks=[EvaluateNodes(), look],
    )  # fmt: skip
    assert sorted(seen) == [0, 3, 6, 8]
    model = network()
    for step, rows in seen.items():
        for node in (0, 1):
            torch.nn.utils.vector_to_parameters(rows[node], model.parameters())
            with torch.no_grad():
                expected = F.cross_entropy(model(val.tensors[0]), val.tensors[1]).item()
            row = next(trainer.history.rows_after(step - 1, node=node))
            assert row["step"] == step and row["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_every_calls_after_each_nth_step_and_sees_the_nodes_there():
    steps = []
    fit(SimpleReduceStrategy(), max_steps=10, callbacks=[Every(3, lambda loop: steps.append(loop.step))])
    assert steps == [3, 6, 9]
    steps.clear()
    strategy = FedAvgStrategy(H=4)
    fit(strategy, num_nodes=2, max_steps=9, callbacks=[Every(3, lambda loop: steps.append(loop.step))])
    assert steps == [3, 6, 9]


@pytest.mark.parametrize("callback", [lambda loop: loop.step >= 6, Every(5, lambda loop: loop.step >= 6)])
def test_true_ends_the_training(callback):
    trainer = fit(
        FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=4), num_nodes=2, max_steps=30, val=examples(8), val_interval=3,
        callbacks=[callback],
    )  # fmt: skip
    last = list(trainer.history.rows(node=None))[-1]
    assert last["step"] == (10 if isinstance(callback, Every) else 6)
    assert last["val_loss"] is not None and last["consensus_distance_after"] == pytest.approx(
        0, abs=1e-6
    )  # synchronised


def test_only_true_ends_it():
    assert fit(SimpleReduceStrategy(), max_steps=3, callbacks=[Every(1, lambda loop: "no")]).history[-1]["step"] == 3


# The end of a run, and the next one


def test_the_final_synchronisation_is_counted_and_can_be_left_out():
    runs = [
        fit(FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=4), num_nodes=2, max_steps=10, final_sync=sync, val=examples(8))
        for sync in (True, False)
    ]
    payload = 4 * sum(p.numel() for p in network().parameters())
    assert [averaged(run, "payload_bytes")[-1] for run in runs] == [3 * payload, 2 * payload]
    assert averaged(runs[0], "consensus_distance_after")[-1] < 1e-6 < averaged(runs[1], "consensus_distance_after")[-1]
    assert averaged(runs[0], "consensus_distance")[-1] == averaged(runs[1], "consensus_distance")[-1]
    assert averaged(runs[0], "val_loss")[-1] == pytest.approx(averaged(runs[1], "val_loss")[-1], rel=1e-5)


def test_a_run_shorter_than_a_round_warns_before_it_trains():
    with pytest.warns(UserWarning, match="first communicates after step 100, but the run has 8"):
        trainer = fit(DiLoCoStrategy(H=100), num_nodes=2, max_steps=8)
    assert averaged(trainer, "payload_bytes")[-1] > 0
    fit(DiLoCoStrategy(H=8), num_nodes=2, max_steps=8)  # no warning


def test_a_second_fit_goes_on_from_the_model_with_fresh_state():
    trainer = LocalTrainer(network(), examples(), loss_fn=F.cross_entropy)
    strategy = DiLoCoStrategy("sgd", H=3, lr=0.1)
    options = {"num_nodes": 2, "max_steps": 6, "batch_size": BATCH, "device": "cpu"}
    first = trainer.fit(strategy, **options)
    halfway, rows = {k: v.clone() for k, v in first.state_dict().items()}, len(trainer.history)
    again = trainer.fit(strategy, **options)
    assert again is first and len(trainer.history) == rows and trainer.history[0]["step"] == 0
    model = network()
    model.load_state_dict(halfway)
    other = fit(DiLoCoStrategy("sgd", H=3, lr=0.1), model=model, num_nodes=2, max_steps=6)
    assert fingerprint(other.model) == fingerprint(again)


def test_the_description_is_json_and_says_what_was_run():
    trainer = fit(SPARTAStrategy(p_sparta=0.1, lr=0.1), num_nodes=2, max_steps=2, precision="bf16")
    described = json.loads(json.dumps(trainer.description))
    assert described == trainer.description
    assert described["strategy"]["name"] == "SPARTAStrategy" and described["strategy"]["p_sparta"] == 0.1
    assert (described["num_nodes"], described["precision"], described["limits"]["total_steps"]) == (2, "bf16", 2)
    assert described["chosen"] == {"compute": "loop", "micro_batch_size": None}


def test_the_last_synchronisation_is_in_every_row_of_its_step():
    """H does not divide T: the bytes of the synchronisation at the end are in the nodes' rows too."""
    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=nn.functional.mse_loss)
    trainer.fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=4, max_steps=10, batch_size=8, device="cpu")
    last = [row for row in trainer.history if row["step"] == 10]
    assert len(last) == 5 and {row["payload_bytes"] for row in last} == {3 * 712.0}


def test_a_model_that_is_given_the_whole_batch_by_mistake():
    _, data = small_problem()
    with pytest.raises(ModelError, match="Otherwise the model gets the whole batch"):
        LocalTrainer(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), data).fit(SimpleReduceStrategy(lr=0.1), device="cpu")
