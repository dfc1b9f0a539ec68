"""compute='graphs' is compute='loop' within a tolerance: all of it but the capture of a CUDA graph, on the CPU.

In the capture's place stands `by_hand`, which runs the same function on the same fixed places. What a CUDA graph of the
real one does was not run by these tests.
"""

import pytest
import torch
from near_the_loop import MODELS, OPTIMIZERS, assert_close, fit

from exogym.core import compute
from exogym.core.base.batches import tensors_in
from exogym.core.compute.graphs import Graphs, Replay, captured
from exogym.errors import ArgumentError, ModelError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy
from exogym.testing import fingerprint


def by_hand(body):
    results = body()

    def replay():
        for place, x in zip(tensors_in(results), tensors_in(body()), strict=True):
            place.copy_(x)

    return replay, results


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(compute.graphs, "DEVICE", "cpu")
    monkeypatch.setattr(compute.compiled, "STEPS", 2)
    monkeypatch.setattr(compute.graphs, "captured", by_hand)


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "groups", "not in a graph"])
def test_every_optimizer_steps_as_in_the_loop(optimizer, capsys):
    runs = [fit(how, FedAvgStrategy(OPTIMIZERS[optimizer], H=13)) for how in ("graphs", "loop")]
    assert_close(*runs)
    assert runs[0].description["chosen"]["compute"] == "graphs"
    assert "exogym: compute='graphs': captured in" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["unused and frozen", "two types", "BatchNorm"])
def test_every_model_trains_as_in_the_loop(model):
    assert_close(*(fit(how, FedAvgStrategy("sgd", lr=0.05, H=6), MODELS[model]) for how in ("graphs", "loop")))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: SimpleReduceStrategy("sgd", lr=0.1),
        lambda: DiLoCoStrategy("adamw", lr=0.01, H=7, max_norm=0.5, lr_scheduler="cosine", warmup_steps=3),
        lambda: FedAvgStrategy("adamw", lr=0.01, H=6, local_steps=[6, 4, 6]),
    ],
)
def test_every_kind_of_strategy(strategy):
    assert_close(*(fit(how, strategy()) for how in ("graphs", "loop")))


def test_rows_go_together(monkeypatch):
    """Three rows in a round of 5: two stretches of two steps and one of one, each with all rows."""
    shapes, stretch = [], Graphs._stretch_of_all

    def seen(self, plain, spans, groups, done):
        shapes.append((len(spans), len(groups[0])))
        return stretch(self, plain, spans, groups, done)

    monkeypatch.setattr(Graphs, "_stretch_of_all", seen)
    fit("graphs", FedAvgStrategy("sgd", lr=0.1, H=5), max_steps=5)
    assert shapes == [(3, 2), (3, 2), (3, 1)]


def test_where_rows_cannot_go_together_they_go_one_by_one(monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("vmap: no rule")

    with monkeypatch.context() as patch:
        patch.setattr(torch.func, "vmap", fails)
        ours = fit("graphs", FedAvgStrategy("sgd", lr=0.1, H=6), max_steps=12)
    assert "rows are computed one after the other" in capsys.readouterr().err
    assert_close(ours, fit("loop", FedAvgStrategy("sgd", lr=0.1, H=6), max_steps=12))


def test_a_run_goes_on_where_it_stopped(tmp_path):
    make = lambda: FedAvgStrategy(OPTIMIZERS["adamw"], H=6)  # noqa: E731
    whole = fit("graphs", make(), max_steps=12, save_dir=tmp_path, checkpoint_interval=6, keep_checkpoints=9)
    next(tmp_path.glob("step_*12")).rename(tmp_path / "last")
    again = fit("graphs", make(), max_steps=12, save_dir=tmp_path, resume=True)
    assert fingerprint(again.model) == fingerprint(whole.model)


def test_a_replay_reads_what_it_is_given_and_gives_what_stays():
    run = Replay(lambda x, more: (x + more[0], [x * 2]), (torch.ones(2), [torch.ones(2)]), by_hand)
    first = run(torch.tensor([1.0, 2.0]), [torch.tensor([3.0, 4.0])])
    second = run(torch.zeros(2), [torch.ones(2)])
    assert [x.tolist() for x in tensors_in(first)] == [[4, 6], [2, 4]]
    assert [x.tolist() for x in tensors_in(second)] == [[1, 1], [0, 0]]


def test_a_graph_that_is_not_replayed_is_found_out(monkeypatch):
    """The control: the first stretch is held against its operations one by one, the others against the loop."""

    def wrong(body):
        results = body()
        return lambda: [x.zero_() for x in tensors_in(results)], results

    monkeypatch.setattr(compute.graphs, "captured", wrong)
    with pytest.raises(ModelError, match="its captured graph and the graph's single operations give different numbers"):
        fit("graphs", FedAvgStrategy("sgd", lr=0.1, H=6), max_steps=6)

    def frozen(body):
        results = body()
        return lambda: None, results

    monkeypatch.setattr(compute.graphs, "captured", frozen)
    runs = [fit(how, FedAvgStrategy("sgd", lr=0.1, H=6), max_steps=12) for how in ("graphs", "loop")]
    with pytest.raises(AssertionError):
        assert_close(*runs)


def test_what_is_refused(monkeypatch):
    with pytest.raises(ModelError, match="it draws random numbers"):
        fit("graphs", FedAvgStrategy("sgd", lr=0.1, H=6), MODELS["dropout"])
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="compute='graphs' with device='cpu': compute='graphs' replays CUDA graphs"):
        fit("graphs", FedAvgStrategy("sgd", lr=0.1, H=6))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(compute.graphs, "captured", captured)
    runs = [fit(how, FedAvgStrategy("adamw", lr=0.01, H=12), device="cuda") for how in ("graphs", "loop")]
    assert_close(*runs, tolerance=1e-4)
