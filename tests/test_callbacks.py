"""What callbacks may ask of the loop, in every layout; what callbacks may not change; state in checkpoints."""

import pytest
import torch
import torch.nn.functional as F
from averages import TimeAverage

from exogym import LocalTrainer
from exogym.callbacks import Callback, Every
from exogym.errors import ModelError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec
from exogym.testing import fingerprint, small_problem

PLAIN = OptimSpec("sgd", lr=0.05)


def fit(callbacks, strategy=None, max_steps=12, **options):
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=F.mse_loss)
    options = {"num_nodes": 3, "batch_size": 8, "val_interval": 4, "device": "cpu"} | options
    trainer.fit(strategy or DiLoCoStrategy(PLAIN, H=3), max_steps=max_steps, callbacks=callbacks, **options)
    return trainer


def test_rows_average_and_measure_are_the_same_in_every_layout():
    def seen(**options):
        found = []

        def look(loop):
            (rows,) = loop.rows()
            vectors, buffers = loop.average()
            found.append((rows.clone(), vectors[0].clone(), loop.measure(vectors, buffers), loop.evaluate()))

        fit([Every(4, look)], FedAvgStrategy(PLAIN, H=5), **options)
        return found

    one, several = seen(), seen(processes=3)
    assert len(one) == 3
    for (rows, mean, measured, evaluated), other in zip(one, several, strict=True):
        assert rows.shape[0] == 3 and not torch.equal(rows[0], rows[2])
        torch.testing.assert_close(rows.mean(0), mean)
        assert torch.equal(rows, other[0]) and torch.equal(mean, other[1])
        assert measured == evaluated == other[2] == other[3]


def test_a_callback_with_state_changes_nothing_of_the_run_and_no_layout_or_stop_changes_it(tmp_path):
    def end(folder=None, **options):
        average = TimeAverage(0.9)
        extra = options.pop("extra", [])
        trainer = fit([average, *extra], save_dir=folder, **options)
        steps, losses = trainer.history.column("average_val_loss")
        return fingerprint(trainer.model), steps.tolist(), losses.tolist(), average.vectors[0].tolist()

    whole = end()
    assert whole[0] == fingerprint(fit([]).model) and whole[1] == [4, 8, 12]
    assert end(processes=3) == whole
    for stop in (3, 8):
        folder = tmp_path / str(stop)
        assert end(folder, extra=[Every(stop, lambda loop: True)])[0] != whole[0]
        assert end(folder, resume=True, processes=2) == whole


def test_state_of_ones_own_callback_is_in_checkpoints(tmp_path):
    class Counting(Callback):
        steps, at_evaluations, count = 2, False, 0

        def __call__(self, loop):
            self.count += 1

        def state(self):
            return {"count": torch.tensor(self.count)}

        def load_state(self, state):
            self.count = int(state.get("count", 0))

    counting = Counting()
    fit([counting], max_steps=8, save_dir=tmp_path)
    assert counting.count == 4
    again = Counting()
    fit([again], max_steps=12, save_dir=tmp_path, resume=True)
    assert again.count == 6


class Still(torch.nn.Sequential):
    """A layer, dropout, a BatchNorm and a layer."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))


def fit_still(change, at=4, begin=lambda model: None, **options):
    """Train `Still`; after step `at` a callback calls `change(model)`."""
    model, (_, data) = Still(), small_problem()
    model[2].eval()
    begin(model)
    features = torch.utils.data.TensorDataset(data.tensors[0][:, :4], data.tensors[1][:, :1])
    trainer = LocalTrainer(model, features, features, loss_fn=F.mse_loss)
    options = {"num_nodes": 2, "batch_size": 8, "max_steps": 8, "val_interval": 3, "device": "cpu"} | options
    act = Every(2, lambda loop: change(model) if loop.step == at else None)
    trainer.fit(FedAvgStrategy(PLAIN, H=3), callbacks=[act], **options)
    return fingerprint(model)


@pytest.mark.parametrize("change", [lambda m: m[1].eval(), lambda m: m.train()])
def test_a_mode_that_a_callback_does_not_put_back_is_refused(change):
    with pytest.raises(ModelError, match=r"after step 4 Every set training=(True|False) for '\d', but fit trains"):
        fit_still(change)
    fit_still(change, at=8)  # after the last step
    again = fit_still(lambda model: (model[2].train(), model[2].eval()))
    assert again == fit_still(lambda model: None)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_that_a_callback_freezes_or_unfreezes_is_refused(trains, processes):
    change = lambda model: model[0].requires_grad_(trains)  # noqa: E731
    begin = lambda model: model[0].requires_grad_(not trains)  # noqa: E731
    with pytest.raises(
        ModelError, match=rf"after step 4 Every set requires_grad={trains} for '0\.weight'.*max_steps=4"
    ):
        fit_still(change, begin=begin, processes=processes)
    fit_still(change, at=8, begin=begin)  # for a second fit
    fit_still(lambda model: change(model) and begin(model), begin=begin)


def test_a_callback_that_ends_the_training_may_unfreeze():
    model, data = small_problem()
    model[0].requires_grad_(False)
    before = fingerprint(model[0])
    trainer = LocalTrainer(model, data, loss_fn=F.mse_loss)

    def unfreeze(loop):
        model[0].requires_grad_(True)
        return True

    for callbacks in ([Every(4, unfreeze)], []):
        assert fingerprint(model[0]) == before
        trainer.fit(FedAvgStrategy(PLAIN, H=3), num_nodes=2, max_steps=8, batch_size=8, callbacks=callbacks)
    assert fingerprint(model[0]) != before


def test_a_model_that_unfreezes_itself_is_refused():
    calls = []

    class Late(torch.nn.Sequential):
        def forward(self, x):
            calls.append(len(x))
            self[0].requires_grad_(len(calls) > 10)
            return super().forward(x)

    model, data = small_problem()
    late = Late(*model)
    late[0].requires_grad_(False)
    with pytest.raises(ModelError, match=r"training set requires_grad=True for '0\.weight', which was frozen"):
        LocalTrainer(late, data, loss_fn=F.mse_loss).fit(FedAvgStrategy(PLAIN, H=3), max_steps=20, batch_size=8)
