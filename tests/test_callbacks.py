"""What callbacks may ask of the loop, in every layout; the average of the model over time; state in checkpoints."""

import copy

import pytest
import torch
import torch.nn.functional as F

from exogym import LocalTrainer
from exogym.callbacks import Callback, Every, WeightAverage
from exogym.errors import ArgumentError, ModelError
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


@pytest.mark.parametrize("decay", [0.8, None])
def test_the_average_is_that_by_hand(decay):
    models = []
    average = WeightAverage(decay, steps=2, start_step=3)
    trainer = fit([Every(2, lambda loop: models.append([x.clone() for x in loop.average()[0]])), average])
    taken = [x for (x,) in models[1:]]  # of steps 4, 6, ..., 12
    wanted = taken[0].clone()
    for k, x in enumerate(taken[1:], start=2):
        wanted = wanted + (x - wanted) / k if decay is None else decay * wanted + (1 - decay) * x
    before = fingerprint(trainer.model)
    model = average.load_into(copy.deepcopy(trainer.model))
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    slots = torch.cat([slot.of(wanted).flatten() for slot, _ in average._names])
    torch.testing.assert_close(found, slots)
    assert fingerprint(trainer.model) == before != fingerprint(model)
    # what is in the history is the loss of that very model
    _, data = small_problem()
    with torch.no_grad():
        loss = F.mse_loss(model.eval()(data.tensors[0]), data.tensors[1]).item()
    assert trainer.history.last["average_val_loss"] == pytest.approx(loss, rel=1e-5)
    assert trainer.history.last["val_loss"] != trainer.history.last["average_val_loss"]
    assert trainer.history.column("average_val_loss")[0].tolist() == [4, 8, 12]


def test_it_changes_nothing_of_the_run_and_no_layout_or_stop_changes_it(tmp_path):
    def end(folder=None, **options):
        average = WeightAverage(0.9, steps=2)
        extra = options.pop("extra", [])
        trainer = fit([average, *extra], **options)
        model = average.load_into(small_problem()[0])
        return fingerprint(model), trainer.history.column("average_val_loss")[1].tolist(), fingerprint(trainer.model)

    whole = end()
    assert whole[2] == fingerprint(fit([]).model)
    assert end(processes=3) == whole
    for stop in (3, 8):
        folder = tmp_path / str(stop)
        stopped = end(save_dir=folder, extra=[Every(stop, lambda loop: True)])
        assert stopped[0] != whole[0]
        assert end(save_dir=folder, resume=True, processes=2) == whole


def test_a_second_fit_begins_a_new_average_and_so_does_a_run_whose_checkpoint_has_none(tmp_path):
    average = WeightAverage(None)
    fit([average], max_steps=4)
    fit([average], max_steps=6)
    assert average.count == 6
    fit([], max_steps=4, save_dir=tmp_path)
    fit([average], max_steps=6, save_dir=tmp_path, resume=True)
    assert average.count == 3  # of steps 4, 5 and 6


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


def test_a_mode_that_a_callback_sets_stays_in_every_layout_and_after_resuming(tmp_path):
    """Dropout is switched off, or on, after step 4."""
    ends = []
    for change, begin in ((lambda m: m[1].eval(), lambda m: None), (lambda m: m[1].train(), lambda m: m[1].eval())):
        folder = tmp_path / str(len(ends))
        wanted = fit_still(change, begin=begin)
        assert wanted != fit_still(lambda m: None, begin=begin)  # the control: the change matters
        assert fit_still(change, begin=begin, processes=2) == wanted
        fit_still(change, begin=begin, max_steps=6, save_dir=folder)
        assert fit_still(change, begin=begin, save_dir=folder, resume=True) == wanted
        ends.append(wanted)
    assert ends[0] != ends[1]


def test_statistics_that_a_callback_sets_going_have_no_rows_and_are_refused():
    with pytest.raises(ModelError, match=r"put '2' into training mode, and training now changes its buffer '2\.\w+'"):
        fit_still(lambda model: model.train())
    fit_still(lambda model: model.train(), at=8)  # after the last step
    again = fit_still(lambda model: (model[2].eval(), model[2].train()), begin=lambda model: model.train())
    assert again == fit_still(lambda model: None, begin=lambda model: model.train())


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


def test_what_cannot_be_averaged_is_said():
    for given in ({"decay": 1.0}, {"decay": -0.1}, {"steps": 0}, {"start_step": -1}, {"decay": "0.9"}):
        with pytest.raises(ArgumentError, match=next(iter(given))):
            WeightAverage(**given)
    with pytest.raises(ArgumentError, match="no model was averaged"):
        WeightAverage().load_into(small_problem()[0])
    late = WeightAverage(start_step=100)
    fit([late], max_steps=4)
    with pytest.raises(ArgumentError, match="no model was averaged"):
        late.load_into(small_problem()[0])
    average = WeightAverage()
    fit([average], max_steps=4)
    with pytest.raises(ArgumentError, match=r"model has no '0.weight'"):
        average.load_into(torch.nn.Linear(2, 2))
