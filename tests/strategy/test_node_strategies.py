"""Strategies as users write them, for one node of many."""

import copy
import random
import signal
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.errors import ExoGymError, StrategyError
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    Strategy,
)
from exogym.strategy.communicate import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from exogym.testing import check_strategy, fingerprint

NODES, STEPS = 4, 10


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("exogym")] == []


def examples(count=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def fit(strategy, num_nodes=NODES, model=None, **options):
    """Return the trainer, and (N, P) of the nodes at the end."""
    kept = {}

    def keep(loop):
        kept["rows"] = torch.cat([block.params.clone() for block in loop.fleet.blocks], 1)

    trainer = LocalTrainer(network() if model is None else model, examples(), loss_fn=F.cross_entropy)
    options = {"max_steps": STEPS, "batch_size": 8, "device": "cpu"} | options
    callbacks = [*options.pop("callbacks", ()), Every(1, keep)]
    trainer.fit(strategy, num_nodes=num_nodes, callbacks=callbacks, **options)
    return trainer, kept["rows"]


class MyCustomStrategy(Strategy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # Custom initialization

    def step(self):
        # Custom communication and optimization logic
        self.communicate_gradients()
        self.update_parameters()
        super().step()  # Handle LR scheduling

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        # Node-specific setup


OPTIONS = {
    "adamw": {"lr": 0.01},
    "clipped": {"inner_optim": OptimSpec("sgd", lr=0.1, momentum=0.9), "max_norm": 0.1},
    "cosine": {"inner_optim": "adamw", "lr": 0.02, "lr_scheduler": "cosine", "warmup_steps": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_documented_strategy_is_ddp(name):
    mine, _ = fit(MyCustomStrategy(**OPTIONS[name]))
    ddp, _ = fit(SimpleReduceStrategy(**OPTIONS[name]))
    for a, b in zip(mine.model.parameters(), ddp.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if "max_norm" in OPTIONS[name] else 0)
    for column in ("lr", "payload_bytes", "tx_bytes", "rx_bytes"):
        assert [r[column] for r in mine.history.rows(None)] == [r[column] for r in ddp.history.rows(None)]


class Averaging(Strategy):
    """FedAvg by hand; `assign` puts a new tensor in the place of the old."""

    def __init__(self, every=3, assign=False, **kwargs):
        super().__init__(**kwargs)
        self.every, self.assign = every, assign

    def step(self):
        self.update_parameters()
        super().step()
        if self.local_step % self.every == 0:
            for p in self.model.parameters():
                if self.assign:
                    p.data = all_reduce(p.data.clone()) / self.num_nodes
                else:
                    all_reduce(p.data, op="mean")


@pytest.mark.parametrize("assign", [False, True])
def test_an_average_by_hand_is_fedavg(assign):
    mine, _ = fit(Averaging(lr=0.01, assign=assign), max_steps=9)
    fedavg, _ = fit(FedAvgStrategy("adamw", lr=0.01, H=3), max_steps=9)
    for a, b in zip(mine.model.parameters(), fedavg.model.parameters(), strict=True):
        assert torch.equal(a, b)


class DiLoCoByHand(Strategy):
    """Its own outer optimizer over its own tensors, made in _init_node, and one in a copy of the model."""

    def __init__(self, H=3, **kwargs):
        super().__init__(**kwargs)
        self.H = H

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.anchor = copy.deepcopy(model)
        self.outer = torch.optim.SGD(self.anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def step(self):
        self.update_parameters()
        super().step()
        if self.local_step % self.H == 0:
            for theta, p in zip(self.anchor.parameters(), self.model.parameters(), strict=True):
                theta.grad = all_reduce(theta.detach() - p.detach(), op="mean")
            self.outer.step()
            for theta, p in zip(self.anchor.parameters(), self.model.parameters(), strict=True):
                p.data.copy_(theta)


def test_an_outer_optimizer_of_ones_own_is_diloco():
    mine, _ = fit(DiLoCoByHand(lr=0.01), max_steps=9)
    diloco, _ = fit(DiLoCoStrategy(lr=0.01, H=3), max_steps=9)
    for a, b in zip(mine.model.parameters(), diloco.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_copy_of_the_model_has_the_memory_of_one_node():
    """A view would bring the rows of all nodes with it."""
    sizes = []

    def look(loop):
        for strategy in loop.driver.algorithm.strategies:
            sizes.append(sum(p.untyped_storage().nbytes() for p in strategy.anchor.parameters()))

    fit(DiLoCoByHand(lr=0.01), max_steps=1, callbacks=[Every(1, look)])
    assert sizes == [4 * sum(p.numel() for p in network().parameters())] * NODES


class Starting(MyCustomStrategy):
    """Changes its parameters before training, in place and by putting others in their place."""

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        first, second, *_ = model.parameters()
        first.data.fill_(rank)
        barrier()
        second.data = torch.full_like(second, rank + 0.5)

    def step(self):
        Strategy.step(self)


def test_what_init_node_does_to_the_parameters_stays():
    _, rows = fit(Starting(lr=0.01), max_steps=1)
    for rank in range(NODES):
        assert set(rows[rank, :48].tolist()) == {rank} and set(rows[rank, 48:56].tolist()) == {rank + 0.5}


class OddOneOut(Strategy):
    """Only node 0 clips and counts, and each keeps the largest part of its own gradient."""

    def step(self):
        grad = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.norm = grad.norm().item()
        if self.rank == 0:
            self.only_here = self.norm
        mask = torch.zeros_like(grad)
        mask[grad.abs().topk(5).indices] = 1
        parameters = list(self.model.parameters())
        for p, part in zip(parameters, mask.split([p.numel() for p in parameters]), strict=True):
            p.grad.mul_(part.view_as(p))
            self.kept = getattr(self, "kept", 0) + int((p.grad != 0).sum())
        self.update_parameters()
        super().step()


def test_rank_and_norm_and_topk_are_of_one_node():
    kept = []

    def look(loop):
        kept.append([(s.rank, s.norm, s.kept, hasattr(s, "only_here")) for s in loop.driver.algorithm.strategies])

    fit(OddOneOut(lr=0.01), callbacks=[Every(2, look)], max_steps=2)
    ((rank, norm, count, own), *others), *_ = kept
    assert (rank, count, own) == (0, 10, True)
    assert [o[0] for o in others] == [1, 2, 3] and [o[2:] for o in others] == [(10, False)] * 3
    assert len({norm, *(o[1] for o in others)}) == NODES


class Talking(Strategy):
    """Every collective once, in _init_node; what came back is kept."""

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        mine = torch.tensor([float(rank), 10.0 * rank])
        blocks = torch.arange(float(num_nodes)) + 100 * rank
        self.got = {
            "sum": all_reduce(mine.clone()),
            "mean": all_reduce(mine.clone(), op="mean"),
            "max": all_reduce(mine.clone(), op="max"),
            "min": all_reduce(mine.clone(), op="min"),
            "broadcast": broadcast(mine.clone(), src=2),
            "reduce": reduce(mine.clone(), dst=1),
            "all_gather": all_gather(mine.clone()),
            "gather": gather(mine.clone(), dst=3),
            "scatter": scatter(blocks.clone(), src=2),
            "reduce_scatter": reduce_scatter(blocks.clone()),
        }
        barrier()
        self.got["all_gather"][0] += 7  # one's own, like everything that comes back

    def step(self):
        self.update_parameters()
        super().step()


def test_all_collectives():
    got = []
    fit(Talking(lr=0.1), max_steps=1, callbacks=[Every(1, lambda loop: got.extend(loop.driver.algorithm.strategies))])
    ranks = range(NODES)
    for rank, strategy in enumerate(got):
        found = strategy.got
        assert found["sum"].tolist() == [6.0, 60.0] and found["mean"].tolist() == [1.5, 15.0]
        assert found["max"].tolist() == [3.0, 30.0] and found["min"].tolist() == [0.0, 0.0]
        assert found["broadcast"].tolist() == [2.0, 20.0]
        assert found["reduce"].tolist() == ([6.0, 60.0] if rank == 1 else [rank, 10.0 * rank])
        assert [t.tolist() for t in found["all_gather"]] == [[7.0, 7.0], *([r, 10.0 * r] for r in ranks[1:])]
        if rank == 3:
            assert [t.tolist() for t in found["gather"]] == [[r, 10.0 * r] for r in ranks]
        else:
            assert found["gather"] is None
        assert found["scatter"].item() == 200 + rank
        assert found["reduce_scatter"].item() == 600 + 4 * rank


# Mistakes


class Mistaken(Strategy):
    def __init__(self, mistake, **kwargs):
        super().__init__(**kwargs)
        self.mistake = mistake

    def step(self):
        getattr(self, self.mistake)()
        self.update_parameters()
        super().step()

    def shape(self):
        all_reduce(torch.zeros(3 + (self.rank == 2)))

    def kind(self):
        (barrier if self.rank == 1 else lambda: all_reduce(torch.zeros(3)))()

    def root(self):
        broadcast(torch.zeros(3), src=self.rank)

    def alone(self):
        if self.rank == 0:
            all_reduce(torch.zeros(3))

    def all_but_one(self):
        if self.rank != 3:
            all_reduce(torch.zeros(3))

    def none(self):
        all_reduce(None)

    def no_such_node(self):
        broadcast(torch.zeros(3), src=9)

    def operation(self):
        all_reduce(torch.zeros(3), op="average")

    def slices(self):
        scatter(torch.zeros(3))

    def of_torch(self):
        torch.distributed.all_reduce(torch.zeros(3))

    def own_error(self):
        all_reduce(torch.zeros(3))
        if self.rank == 2:
            raise KeyError("my own")
        try:
            all_reduce(torch.zeros(3))
        except Exception:  # what ends this node is none of its errors
            raise AssertionError("nothing to catch here") from None
        finally:
            all_reduce(torch.zeros(2))  # also here it ends


@pytest.mark.parametrize(
    "mistake, error, words",
    [
        ("shape", StrategyError, r"node 0 waits at all_reduce.*\(3,\).* node 2 waits at all_reduce.*\(4,\)"),
        ("kind", StrategyError, "node 0 waits at all_reduce.*node 1 waits at barrier"),
        ("root", StrategyError, "node 0 waits at broadcast.*src=0.* node 1 waits at broadcast.*src=1"),
        ("alone", StrategyError, "node 0 waits at all_reduce.*node 1 has ended"),
        ("all_but_one", StrategyError, "node 0 waits at all_reduce.*node 3 has ended"),
        ("none", StrategyError, "got a NoneType, expected a tensor"),
        ("no_such_node", ExoGymError, "node 9"),
        ("operation", ExoGymError, "op='average' is not one of"),
        ("slices", ExoGymError, "one slice per node"),
        ("of_torch", StrategyError, "no process group here: use all_reduce"),
        ("own_error", KeyError, "my own"),
    ],
)
def test_a_mistake_is_named_and_ends_the_run(mistake, error, words):
    trainer = LocalTrainer(network(), examples(), loss_fn=F.cross_entropy)
    with pytest.raises(error, match=words):
        trainer.fit(Mistaken(mistake), num_nodes=NODES, max_steps=3, batch_size=8, device="cpu")
    assert trainer.model(torch.zeros(1, 6)).isfinite().all()
    assert trainer.history[0]["step"] == 0
    trainer.fit(MyCustomStrategy(), num_nodes=NODES, max_steps=2, batch_size=8, device="cpu")  # nothing is stuck


class Forgets(Strategy):
    def __init__(self, what, **kwargs):
        if what != "init":
            super().__init__(**kwargs)
        self.what = what

    def _init_node(self, model, rank, num_nodes):
        if self.what == "error" and rank == 1:
            raise ZeroDivisionError("in node 1")
        if self.what != "init_node":
            super()._init_node(model, rank, num_nodes)

    def step(self):
        self.update_parameters()
        if self.what != "step":
            super().step()


@pytest.mark.parametrize(
    "what, error, words",
    [
        ("init", StrategyError, r"must call super\(\).__init__"),
        ("init_node", StrategyError, r"must call super\(\)._init_node"),
        ("error", ZeroDivisionError, "in node 1"),
    ],
)
def test_a_forgotten_call_of_super_is_named_before_training(what, error, words):
    with pytest.raises(error, match=words):
        fit(Forgets(what))


def test_a_step_that_does_not_end_the_step_is_an_error():
    with pytest.raises(StrategyError, match=r"step must call super\(\).step"):
        fit(Forgets("step", lr=0.1))


def test_a_strategy_without_a_step_is_an_error():
    class Nothing(Strategy):
        pass

    with pytest.raises(StrategyError, match=r"Nothing does not override step\(\)"):
        fit(Nothing(lr=0.1))


class Old(Strategy):
    """Sets attributes as strategies of the first ExoGym did."""

    def __init__(self, *given, attributes, **options):
        super().__init__(*given, **options)
        for name, value in attributes.items():
            setattr(self, name, value)

    def step(self):
        self.communicate_gradients()
        self.update_parameters()
        super().step()


class OldWithItsOwn(Old):
    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.optim = self.optim_spec.build(model.parameters())
        assert self.lr_scheduler == "lambda_cosine"


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"optim_spec": OptimSpec("sgd", lr=0.123)}, r"optim_spec=OptimSpec\(SGD, lr=0.123\), but .* AdamW, lr=0.001"),
        (
            {"optim_spec": OptimSpec("adamw", lr=0.123)},
            r"but the node trains with AdamW, lr=0.001.*super\(\).__init__\(opt",
        ),
        ({"optim_spec": torch.optim.SGD}, r"OptimSpec\(SGD\), but the node trains with AdamW"),
        ({"optim": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, r"__init__ sets self.optim, but the strategy makes"),
        (
            {"lr_scheduler": "lambda_cosine"},
            r"self.lr_scheduler='lambda_cosine', but .* None: pass it there, as in super",
        ),
        ({"lr_scheduler_kwargs": {"warmup_steps": 5}}, r"self.lr_scheduler_kwargs=.*warmup_steps=10"),
    ],
)
def test_attributes_of_the_first_exogym_are_not_ignored(attributes, words):
    with pytest.raises(StrategyError, match=words):
        fit(Old(attributes=attributes))


def test_attributes_that_say_what_the_node_has_are_allowed():
    spec = OptimSpec("sgd", lr=0.1)
    kept = {"optim_spec": spec, "lr_scheduler": "cosine", "lr_scheduler_kwargs": {}, "optim": None}
    _, wanted = fit(Old(spec, lr_scheduler="cosine", attributes={}))
    assert torch.equal(fit(Old(spec, lr_scheduler="cosine", attributes=kept))[1], wanted)
    fit(Old(attributes={"optim_spec": "my own words"}))
    own = OldWithItsOwn(attributes={"optim_spec": spec, "lr_scheduler": "lambda_cosine"})
    assert torch.equal(fit(own)[1], fit(Old(spec, attributes={}))[1])


def test_collectives_outside_a_step_are_refused():
    with pytest.raises(StrategyError, match="outside a strategy's step"):
        all_reduce(torch.zeros(2))


def test_rows_strategies_are_not_subclassed_for_one_node():
    with pytest.raises(StrategyError, match=r"overrides step\(\).*subclass Strategy"):

        class Wrong(DiLoCoStrategy):
            def step(self):
                super().step()

    with pytest.raises(StrategyError, match=r"overrides _init_node\(\)"):

        class WrongToo(CommunicateOptimizeStrategy):
            def _init_node(self, model, rank, num_nodes):
                super()._init_node(model, rank, num_nodes)


class Interrupted(Strategy):
    """Ctrl-C comes while a node's program runs, or while it is between two collectives."""

    def step(self):
        self.communicate_gradients()
        if self.local_step == 1 and self.rank == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
            for p in self.model.parameters():
                p.data.fill_(7)  # still its own row
            all_reduce(torch.zeros(3))
        self.update_parameters()
        super().step()


def test_ctrl_c_within_a_step_ends_the_run_and_its_threads():
    trainer = LocalTrainer(network(), examples(), loss_fn=F.cross_entropy)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Interrupted(lr=0.1), num_nodes=3, max_steps=5, batch_size=8, device="cpu")
    assert trainer.history[-1]["step"] == 1
    assert all(p.isfinite().all() and not (p == 7).all() for p in trainer.model.parameters())


# Random numbers of a strategy


class Rolling(Strategy):
    """Noise from each of the three generators, before and after a collective."""

    def step(self):
        for p in self.model.parameters():
            noise = torch.randn(()) + random.random() + np.random.rand()
            barrier()
            p.grad.add_(noise + torch.randn(()) + random.random() + np.random.rand())
        self.update_parameters()
        super().step()


def test_a_strategys_dice_follow_from_the_seed_alone():
    ends = []
    for callers in (1, 2):
        random.seed(callers)
        np.random.seed(callers)
        torch.manual_seed(callers)
        _, rows = fit(Rolling(lr=0.01))
        ends.append(rows)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(fit(Rolling(lr=0.01), seed=1)[1], ends[0])
    check_strategy(lambda: Rolling(lr=0.01), num_nodes=3, skip=("learns",))  # also after stopping


# All rows at once


class Stacked(Strategy):
    """The gradient's sign, scaled by each row's mean, averaged: right for rows and for one node alike."""

    stacked = True

    def step(self):
        for p in self.model.parameters():
            scale = p.grad.flatten(1).abs().mean(1).view(-1, *[1] * (p.dim() - 1))
            p.grad.copy_(p.grad.sign() * scale)
        self.communicate_gradients()
        self.update_parameters()
        super().step()


class OneByOne(Strategy):
    def step(self):
        for p in self.model.parameters():
            p.grad.copy_(p.grad.sign() * p.grad.abs().mean())
        self.communicate_gradients()
        self.update_parameters()
        super().step()


class Crossing(Stacked):
    def step(self):
        for p in self.model.parameters():
            p.grad.copy_(p.grad.sign() * p.grad.abs().mean())  # of all rows together
        self.communicate_gradients()
        self.update_parameters()
        Strategy.step(self)


class BrokenStacked(Stacked):
    def step(self):
        raise LookupError("within the trial")


def test_stacked_is_the_same_as_one_by_one():
    options = {"inner_optim": "adamw", "lr": 0.01, "max_norm": 1.0, "lr_scheduler": "cosine"}
    together, rows = fit(Stacked(**options))
    alone, other = fit(OneByOne(**options))
    torch.testing.assert_close(rows, other, rtol=0, atol=1e-6)
    assert together.history[-1]["tx_bytes"] == alone.history[-1]["tx_bytes"]


def test_stacked_code_that_crosses_rows_is_refused_before_training():
    model = network()
    before = fingerprint(model)
    with pytest.raises(StrategyError, match="crosses the row axis"):
        fit(Crossing(lr=0.01), model=model)
    assert fingerprint(model) == before
    with pytest.raises(LookupError):
        fit(BrokenStacked(lr=0.01))


# Scale, and state of one's own


def test_64_nodes():
    trainer, rows = fit(MyCustomStrategy(lr=0.01), num_nodes=64, max_steps=3, batch_size=1)
    assert rows.shape[0] == 64 and torch.equal(rows, rows[:1].expand(64, -1))
    ddp, _ = fit(SimpleReduceStrategy(lr=0.01), num_nodes=64, max_steps=3, batch_size=1)
    assert fingerprint(trainer.model) == fingerprint(ddp.model)


class Stateful(Strategy):
    """State in every form that a user may think of."""

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.anchor = copy.deepcopy(model)
        self.outer = torch.optim.SGD(self.anchor.parameters(), lr=0.5, momentum=0.5)
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.outer, 0.9)
        self.by_parameter = {p: torch.zeros_like(p) for p in model.parameters()}
        self.counts = defaultdict(int)
        self.generator = torch.Generator().manual_seed(rank)
        self.nested = [{"mean": np.zeros(2)}, (1, 2.5, None, "text", True)]

    def step(self):
        if not hasattr(self, "late"):
            self.late = list(self.model.parameters())
            self.momentum = [torch.zeros_like(p) for p in self.late]
        for p, m in zip(self.late, self.momentum, strict=True):
            m.mul_(0.9).add_(p.grad)
            self.by_parameter[p].add_(m, alpha=0.1)
            p.grad.copy_(m + self.by_parameter[p] + 0.01 * torch.randn(p.shape, generator=self.generator))
        self.counts[str(self.local_step % 3)] += 1
        self.nested[0]["mean"] += [self.rank, 1.0]
        self.nested[1] = (self.nested[1][0] + 1, *self.nested[1][1:])
        self.update_parameters()
        if self.local_step % 4 == 3:
            scale = 1 + 0.01 * self.counts["0"] + 0.001 * float(self.nested[0]["mean"].sum()) + self.nested[1][0]
            for a, p in zip(self.anchor.parameters(), self.model.parameters(), strict=True):
                a.grad = all_reduce(a.detach() - p.detach(), op="mean") / scale
            self.outer.step()
            self.decay.step()
            for a, p in zip(self.anchor.parameters(), self.model.parameters(), strict=True):
                p.data.copy_(a)
        super().step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_laws_hold_for_state_of_every_form():
    """Stopping at any step is one of them: all that the attributes hold is in a checkpoint."""
    seen = check_strategy(lambda: Stateful("adamw", lr=0.02, lr_scheduler="cosine", warmup_steps=3), num_nodes=3)
    assert {"stopping", "stretches", "repeatable"} <= set(seen)


def test_what_cannot_be_saved_is_said_before_training(tmp_path):
    class Odd(MyCustomStrategy):
        def _init_node(self, model, rank, num_nodes):
            super()._init_node(model, rank, num_nodes)
            self.seen = {1, 2}

    fit(Odd())  # without checkpoints it may
    with pytest.raises(StrategyError, match="'seen' is a set, which cannot be saved"):
        fit(Odd(), save_dir=tmp_path / "run", callbacks=[Every(1, lambda loop: pytest.fail("it trained"))])
    assert not (tmp_path / "run").exists()


class WithStateDict(MyCustomStrategy):
    """Says itself what its state is."""

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.seen = {0}

    def step(self):
        self.seen.add(self.local_step)
        for p in self.model.parameters():
            p.grad.mul_(1 + 0.1 * len(self.seen))
        super().step()

    def state_dict(self):
        optim = {str(k): v for k, v in self.optim.state_dict()["state"].items()}
        return {"seen": sorted(self.seen), "local_step": self.local_step, "optim": optim}

    def load_state_dict(self, state):
        self.seen, self.local_step = set(state["seen"]), state["local_step"]
        groups = self.optim.state_dict()["param_groups"]
        self.optim.load_state_dict({"state": {int(k): v for k, v in state["optim"].items()}, "param_groups": groups})


def test_a_strategy_may_say_itself_what_its_state_is(tmp_path):
    whole, _ = fit(WithStateDict(lr=0.02))
    fit(WithStateDict(lr=0.02), save_dir=tmp_path, checkpoint_interval=4, callbacks=[Every(4, lambda loop: True)])
    resumed, _ = fit(WithStateDict(lr=0.02), save_dir=tmp_path, resume=True)
    assert fingerprint(resumed.model) == fingerprint(whole.model)
