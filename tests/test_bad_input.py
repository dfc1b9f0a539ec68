"""What a user may get wrong: the documented exception, before training, and nothing changed or left behind."""

import dataclasses
import inspect
import multiprocessing
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from exogym import LocalTrainer, NetworkTrainer, Placement
from exogym.callbacks import EvaluateNodes, Every
from exogym.cli.compare import words_of
from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError, CheckpointError, DataError, ExoGymError, ModelError, TrainingError
from exogym.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.testing import fingerprint


def examples(count=32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def world():
    """What of the caller's a fit must leave alone."""
    numpy_state = np.random.get_state()
    return (
        random.getstate(),
        (numpy_state[1].tobytes(), numpy_state[2:]),
        torch.random.get_rng_state().numpy().tobytes(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    """No file where the test runs, no change to the caller's random numbers, threads and modes: whatever happens."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(2)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before, threads = world(), set(threading.enumerate())
    yield
    try:
        assert world() == before
        new = set(threading.enumerate()) - threads
        assert not [t.name for t in new if t.name != "QueueFeederThread"]  # of a DataLoader: ends by itself
        assert list(tmp_path.iterdir()) == []
    finally:
        torch.set_num_threads(1)


def test_the_watch_on_the_callers_world_sees_a_change():
    before = world()
    for change in (lambda: random.random(), lambda: np.random.rand(), lambda: torch.rand(1)):
        change()
        assert world() != before
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        assert world() == before


def start(strategy=None, model=None, data=None, val=None, loss_fn=F.cross_entropy, **options):
    with torch.random.fork_rng():
        trainer = LocalTrainer(network() if model is None else model, examples() if data is None else data, val,
                               loss_fn=loss_fn)  # fmt: skip
    options = {"max_steps": 2, "batch_size": 4, "num_nodes": 2, "device": "cpu"} | options
    trainer.fit(SimpleReduceStrategy() if strategy is None else strategy, **options)
    return trainer


class NoLength:
    def __getitem__(self, index):
        return torch.zeros(6), 0


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


def one_empty_shard(rank, num_nodes, is_train):
    return examples(4 if rank == 0 else 0)


def wrong_factory(rank):
    return examples()


FIT = {
    "placement": ({"placement": {"keep_checkpoints": 0}}, ArgumentError, "placement=.* must be a Placement"),
    "memory over 1": ({"max_memory_usage": 80}, ArgumentError, "max_memory_usage=80"),
    "memory 0": ({"max_memory_usage": 0}, ArgumentError, "max_memory_usage=0"),
    "memory text": ({"max_memory_usage": "80%"}, ArgumentError, "max_memory_usage='80%'"),
    "no memory": ({"max_memory_usage": 1e-12, "model": nn.Linear(6, 2)}, ArgumentError, "one example needs"),
    "no memory for 2": (
        {"max_memory_usage": 1e-12},
        ArgumentError,
        "too little for 2 examples, and the model cannot compute the loss of 1",
    ),
    "seed": ({"seed": 1.5}, ArgumentError, r"seed=1\.5 must be a whole number"),
    "precision": ({"precision": "fp8"}, ArgumentError, "precision='fp8' is not one of 'fp32', 'bf16', 'fp16'"),
    "precision list": ({"precision": []}, ArgumentError, r"precision=\[\] is not one of"),
    "two precisions": ({"precision": "fp16", "autocast": True}, ArgumentError, "autocast=True means precision='bf16'"),
    "device": ({"device": "gpu"}, ArgumentError, "device='gpu' is unknown: use 'auto', 'cpu'"),
    "device None": ({"device": None}, ArgumentError, "device=None is unknown"),
    "device 10^30": ({"device": 10**30}, ArgumentError, "device=10+ is unknown"),
    "device meta": ({"device": "meta"}, ArgumentError, "device='meta': torch sees no meta device here"),
    "compute": (
        {"compute": "fast"},
        ArgumentError,
        "compute='fast' is not one of 'loop', 'vmap'",
    ),
    "vmap BatchNorm": ({"compute": "vmap"}, ModelError, "compute='vmap' cannot train this model"),
    "strategy class": ({"strategy": SimpleReduceStrategy}, ArgumentError, r"is not a Strategy: pass an instance"),
    "strategy name": ({"strategy": "diloco"}, ArgumentError, "strategy='diloco' is not .*parse_strategy"),
    "callback": ({"callbacks": EvaluateNodes}, ArgumentError, "must be a list of functions"),
    "callback text": ({"callbacks": "x"}, ArgumentError, "callbacks='x' must be a list of functions"),
    "callback 3": ({"callbacks": [3]}, ArgumentError, "callbacks: 3 is not callable"),
    "checkpoints nowhere": ({"checkpoint_interval": 5}, ArgumentError, "checkpoint_interval=5 needs save_dir"),
    "resume nowhere": ({"resume": True}, ArgumentError, "resume=True needs save_dir"),
    "save_dir": ({"save_dir": 7}, ArgumentError, "save_dir=7 must be the path"),
    "unwritable": ({"save_dir": "/proc/nowhere"}, ArgumentError, "save_dir='/proc/nowhere' cannot be written"),
    "resume text": ({"resume": "yes", "save_dir": "run"}, ArgumentError, "resume='yes' must be True or False"),
    "val_size": ({"val_size": 10}, ArgumentError, "val_size=10 needs val_dataset"),
    "val_interval": ({"val_interval": 10}, ArgumentError, "val_interval=10 needs val_dataset"),
    "logger": ({"logger": 3}, ArgumentError, "logger=3 is not a logger"),
    "logger text": ({"logger": "csv"}, ArgumentError, "logger='csv' is not a logger"),
    "logger among": ({"logger": [print, 3]}, ArgumentError, "logger=3 is not a logger"),
    "partitioner": ({"partitioner": "dirichle:0.3"}, ArgumentError, "dirichle"),
    "partitioner kind": ({"partitioner": 3}, ArgumentError, "partitioner=3 is not a Partitioner"),
    "loader argument": ({"dataloader_kwargs": {"worker": 2}}, ArgumentError, "DataLoader has no argument 'worker'"),
    "loader number": ({"dataloader_kwargs": 1}, ArgumentError, "dataloader_kwargs=1 must be a dict"),
    "loader zero": ({"dataloader_kwargs": 0}, ArgumentError, "dataloader_kwargs=0 must be a dict"),
    "loader numbers": ({"dataloader_kwargs": [1]}, ArgumentError, r"dataloader_kwargs=\[1\] must be a dict"),
    "loader batch": ({"dataloader_kwargs": {"batch_size": 2}}, ArgumentError, "use the argument batch_size of fit"),
    "empty data": ({"data": []}, DataError, r"is empty: provide at least one example"),
    "empty tensors": ({"data": TensorDataset(torch.zeros(0, 6))}, DataError, "is empty"),
    "empty shard": ({"data": one_empty_shard}, DataError, "data set for node 1 .* is empty"),
    "more nodes than examples": (
        {"data": examples(2), "partitioner": "iid", "num_nodes": 3},
        DataError,
        "2 examples are too few for 3 nodes",
    ),
    "factory": ({"data": wrong_factory}, DataError, r"wrong_factory\(rank\) cannot be called as a data set factory"),
    "no data": ({"data": 3}, DataError, "the data set is a int"),
    "loader": ({"data": DataLoader(examples())}, DataError, r"for a DataLoader give its \.dataset"),
    "no length": ({"data": NoLength()}, DataError, "has no length"),
    "iterable": (
        {"data": Endless(), "num_epochs": 2, "max_steps": None},
        ArgumentError,
        "an epoch's length is unknown",
    ),
    "generator": ({"data": (x for x in examples())}, DataError, "is a generator, which can be read only once"),
    "tensors": ({"data": (torch.zeros(4, 6), torch.zeros(4))}, DataError, r"use TensorDataset\(\*tensors\)"),
    "empty validation": ({"val": []}, DataError, "is empty"),
    "no targets": ({"data": TensorDataset(torch.zeros(8, 6)), "model": nn.Linear(6, 2)}, DataError, "needs targets"),
    "no loss": (
        {"loss_fn": None, "data": torch.zeros(8, 6), "model": nn.Linear(6, 2)},
        ModelError,
        r"must return a loss.*returned a tensor of shape \(4, 2\).*pass loss_fn=",
    ),
    "loss of each": ({"loss_fn": nn.CrossEntropyLoss(reduction="none")}, ModelError, "must return a scalar tensor"),
    "loss class": (
        {"loss_fn": lambda p, y: "loss"},
        ModelError,
        "loss_fn must return a scalar tensor .*, but returned str",
    ),
    "all frozen": ({"model": nn.Linear(6, 2).requires_grad_(False)}, ModelError, "any trainable parameter"),
    "no parameters": ({"model": nn.Identity()}, ModelError, "any trainable parameter"),
    "meta": ({"model": nn.Linear(6, 2, device="meta")}, ModelError, "'weight' is on the meta device"),
}
if not torch.accelerator.is_available():
    FIT["no GPU"] = ({"device": "cuda"}, ArgumentError, "device='cuda': torch sees no cuda device here")


@pytest.mark.parametrize("name", FIT)
def test_refused_before_training(name):
    given, error, words = FIT[name]
    options = {"callbacks": [Every(1, lambda loop: pytest.fail("it trained"))], "save_dir": "run"} | given
    if name in ("checkpoints nowhere", "resume nowhere"):
        del options["save_dir"]
    with pytest.raises(error, match=words):
        start(**options)


OF_FIT, OF_PLACEMENT = ([field.name for field in dataclasses.fields(kind)] for kind in (FitOptions, Placement))
COUNTS = [option.name for option in dataclasses.fields(FitOptions) if option.type in ("int", "int | None")]


@pytest.mark.parametrize("name", [name for name in COUNTS if name != "seed"])
def test_a_count_is_a_whole_number_from_1(name):
    for wrong in (0, -1, 2.0, True, "4", 10**30):
        with pytest.raises(ArgumentError, match=rf"^{name}={wrong!r} must be a whole number of at least 1"):
            start(**{name: wrong})


STRANGE = [
    None, 0, -1, 1, 2.5, True, "x", "", "-1", "auto", [], [1], {}, {"a": 1}, (1, 2), b"x", object(), lambda: 1,
    float("nan"), float("inf"), 1e-300, 2**53, 10**30,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:batch_size=")
@pytest.mark.parametrize(
    "name", [name for name in (*OF_FIT, *OF_PLACEMENT) if name not in ("max_steps", "save_dir", "run_dir")]
)
def test_a_strange_value_is_taken_or_refused_by_name(name):
    with torch.random.fork_rng():
        model = nn.Linear(6, 2)
    for value in STRANGE:
        try:
            given = {"placement": Placement(**{name: value})} if name in OF_PLACEMENT else {name: value}
            start(**{"model": model, "num_nodes": 2, "max_steps": 2} | given)
        except ExoGymError as error:
            refused = str(error)
            assert name in refused or name in ("gradient_accumulation", "network", "strategy"), (value, refused)


MISSPELT = {
    "num_node": "did you mean 'num_nodes'",
    "epochs": "did you mean 'num_epochs'",
    "batchsize": "did you mean 'batch_size'",
    "nodes": "did you mean 'num_nodes'",
    "devices": "did you mean 'device'",
    "steps": "did you mean 'max_steps'",
    "lr": "fit\\(\\) has no argument 'lr'",
    "checkpoint_every": "did you mean 'checkpoint_interval'",
    "loggers": "did you mean 'logger'",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_argument_of_fit(name):
    with pytest.raises(ArgumentError, match=MISSPELT[name]):
        start(**{name: 1})


def test_missing_and_positional_arguments():
    trainer = LocalTrainer(nn.Identity(), examples())
    with pytest.raises(ArgumentError, match="missing a required argument: 'strategy'"):
        trainer.fit()
    with pytest.raises(ArgumentError, match="too many positional arguments"):
        trainer.fit(SimpleReduceStrategy(), 4)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"val_datasets": []}, "did you mean 'val_dataset'"),
        ({"loss": F.cross_entropy}, "did you mean 'loss_fn'"),
        ({"loss_fn": 3}, "loss_fn=3 must be a function"),
        ({"loss_fn": nn.CrossEntropyLoss}, r"is a class: pass an instance, CrossEntropyLoss\(\)"),
        ({"metrics": [F.cross_entropy]}, "must map names to functions"),
        ({"metrics": {"error": 3}}, "must map names to functions"),
    ],
)
def test_wrong_arguments_of_the_trainer(given, words):
    with pytest.raises(ArgumentError, match=words):
        LocalTrainer(nn.Identity(), examples(), **given)


def test_a_model_that_is_none():
    with pytest.raises(ArgumentError, match=r"model must be a torch\.nn\.Module, not function"):
        LocalTrainer(lambda x: x, examples())


class Mine(Strategy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    def step(self):
        self.update_parameters()
        super().step()


STRATEGIES = [
    (lambda: DiLoCoStrategy(inner_optimizer="adamw"), "did you mean 'inner_optim'"),
    (lambda: DiLoCoStrategy(h=10), "has no argument 'h'"),
    (lambda: DiLoCoStrategy(H=0), "H=0 must be a whole number"),
    (lambda: DiLoCoStrategy(outer_optim="nesterov"), "unknown optimizer 'nesterov'"),
    (lambda: FedAvgStrategy("adamm"), "unknown optimizer 'adamm': did you mean 'adam"),
    (lambda: FedAvgStrategy(islands=4), "did you mean 'island_size'"),
    (lambda: SPARTAStrategy(p_spart=0.1), "did you mean 'p_sparta'"),
    (lambda: SPARTAStrategy(compression_method="top-k"), "did you mean 'topk'"),
    (lambda: DeMoStrategy(compression_top_k=3), "did you mean 'compression_topk'"),
    (lambda: SimpleReduceStrategy(max_norm=-1), "max_norm=-1 must be a positive number"),
    (lambda: SimpleReduceStrategy(lr=-0.1), r"lr=-0\.1 must be a number"),
    (lambda: SimpleReduceStrategy(lr="fast"), "lr='fast' must be a number"),
    (lambda: SimpleReduceStrategy(lr=0.1, inner_lr=0.2), "inner_lr=0.2 means lr=0.2, but lr=0.1 was passed as well"),
    (lambda: SimpleReduceStrategy(OptimSpec("sgd", lr=0.1), lr=0.2), "lr is given twice"),
    (lambda: SimpleReduceStrategy(lr_scheduler="cosin"), "did you mean 'cosine'"),
    (lambda: SimpleReduceStrategy(warmup_steps=1.5), r"warmup_steps=1\.5"),
    (lambda: SimpleReduceStrategy("lbfgs"), "LBFGS cannot be used here"),
    (lambda: SimpleReduceStrategy(torch.optim.SparseAdam), "SparseAdam cannot be used here"),
    (lambda: SimpleReduceStrategy(nn.Linear), "an optimizer is a name"),
    (lambda: OptimSpec(torch.optim.SGD([torch.zeros(1)])), "not an existing SGD"),
    (lambda: OptimSpec("sgd", momentun=0.9), "SGD has no argument 'momentun': did you mean 'momentum'"),
    (lambda: Mine(inner_optimizer="adamw"), "did you mean 'inner_optim'"),
    (lambda: Mine(H=5), "has no argument 'H'"),
]


@pytest.mark.parametrize("make, words", STRATEGIES, ids=[words for _, words in STRATEGIES])
def test_wrong_arguments_of_strategies(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_every_argument_error_is_a_value_error_and_a_type_error():
    for kind in (ValueError, TypeError, ExoGymError):
        with pytest.raises(kind):
            start(num_nodes=0)


@pytest.mark.parametrize("trainer, other", [(LocalTrainer, {}), (NetworkTrainer, {"num_nodes": None})])
def test_options_are_the_arguments_of_fit(trainer, other):
    """Editors and `help` show what is taken: the fields of the one definition, with their types and defaults."""
    shown = inspect.signature(trainer.fit)
    defined = inspect.signature(FitOptions).parameters
    assert [*shown.parameters] == ["self", *defined] and shown.return_annotation == "nn.Module"
    for name, field in defined.items():
        if name in other:
            field = field.replace(default=other[name], annotation=f"{field.annotation} | None")
        assert shown.parameters[name] == field
    assert "max_steps: Length of the run" in inspect.getdoc(LocalTrainer.fit)


def test_each_option_has_its_words():
    assert all(words_of(name).endswith(".") for name in (*OF_FIT, *OF_PLACEMENT))


def test_success_leaves_the_callers_world_alone():
    """The watch of this file looks after each test; here all that draws numbers is at work."""
    trainer = start(num_nodes=3, max_steps=5, val=examples(8))
    assert trainer.history[-1]["step"] == 5
    start(Mine(), num_nodes=3, max_steps=3)


def test_the_callers_random_state_changes_no_result():
    first = fingerprint(start().model)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    assert fingerprint(start().model) == first
    random.seed(5), np.random.seed(5), torch.manual_seed(5)


# Errors while it trains


class TurnsBad(nn.Module):
    """The loss of whoever meets the marked example is `value`."""

    def __init__(self, value):
        super().__init__()
        self.out, self.value = nn.Linear(6, 2), value

    def forward(self, x):
        bad = (x[:, 0] == 99).any() and self.training
        return self.out(x.clamp(max=3)) * (self.value if bad else 1.0)


def marked(rank, num_nodes, is_train):
    """Node 2's 10th example is the bad one: in batches of 4, its third step."""
    x, y = examples(32).tensors
    x = x.clone()
    if rank == 2:
        x[9, 0] = 99
    return TensorDataset(x, y)


BAD_LOSS_STRATEGIES = {
    "ddp": lambda: SimpleReduceStrategy(lr=0.01),
    "local steps": lambda: FedAvgStrategy("adamw", lr=0.01, H=2),
    "one node": lambda: Mine(lr=0.01),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", BAD_LOSS_STRATEGIES)
def test_a_loss_that_is_not_a_number_names_node_and_step(name, value):
    with torch.random.fork_rng():
        model = TurnsBad(value)
    before = fingerprint(model)
    trainer = LocalTrainer(model, marked, examples(8), loss_fn=F.cross_entropy)
    with pytest.raises(TrainingError, match=r"the loss of node 2 became (nan|inf) at its step 3: lower the learning"):
        trainer.fit(BAD_LOSS_STRATEGIES[name](), num_nodes=3, max_steps=8, batch_size=4, shuffle=False, device="cpu",
                    val_interval=2)  # fmt: skip
    assert [row["step"] for row in trainer.history.rows(None)] == [0, 1, 2]
    assert fingerprint(model) != before
    if name != "local steps":
        assert all(p.isfinite().all() for p in model.parameters())


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("name", BAD_LOSS_STRATEGIES)
def test_ctrl_c_and_errors_in_a_callback_keep_model_and_history(name, error):
    def interrupt(loop):
        if loop.step == 4:
            raise error

    with torch.random.fork_rng():
        trainer = LocalTrainer(network(), examples(), examples(8), loss_fn=F.cross_entropy)
    with pytest.raises(error):
        trainer.fit(BAD_LOSS_STRATEGIES[name](), num_nodes=2, max_steps=8, batch_size=4, device="cpu",
                    callbacks=[Every(2, interrupt)])  # fmt: skip
    assert trainer.history[-1]["step"] == 4
    shorter = start(BAD_LOSS_STRATEGIES[name](), max_steps=4, val=examples(8))
    assert fingerprint(trainer.model) == fingerprint(shorter.model)
    assert trainer.model.training


@pytest.mark.parametrize("name", BAD_LOSS_STRATEGIES)
def test_an_error_before_training_leaves_the_model_as_it_was(name):
    with torch.random.fork_rng():
        model = network()
    model.eval()
    before, homes = fingerprint(model), [x.data_ptr() for x in [*model.parameters(), *model.buffers()]]
    with pytest.raises(DataError):
        start(BAD_LOSS_STRATEGIES[name](), model=model, val=[], num_nodes=3)
    assert fingerprint(model) == before and not model.training
    assert [x.data_ptr() for x in [*model.parameters(), *model.buffers()]] == homes
    assert all(p.grad is None for p in model.parameters())


def test_a_failing_logger_ends_the_run_and_is_finished():
    finished = []

    class Failing:
        def log(self, record):
            if record["step"] == 2:
                raise Stop

        def finish(self, summary):
            finished.append(summary.get("step"))

    with pytest.raises(Stop):
        start(logger=Failing(), max_steps=4)
    assert finished == [2]


def test_a_data_set_that_fails_ends_the_run():
    class Failing(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            if index == 13:
                raise Stop
            return torch.zeros(6), 0

    with pytest.raises(DataError, match="index 13, an example of node 1: Stop") as caught:
        start(data=Failing(), max_steps=8, shuffle=False)
    assert isinstance(caught.value.__cause__, Stop)


class Rows(torch.utils.data.Dataset):
    """Read one by one, so that workers of the DataLoader do it."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index % 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "given", [{}, {"model": nn.Linear(6, 2).requires_grad_(False)}, {"val": []}, {"strategy": Mine(max_norm=0.1)}]
)
def test_no_worker_of_the_data_loader_outlives_the_run(given):
    error = None
    try:
        start(**({"data": Rows(), "val": Rows(), "dataloader_kwargs": {"num_workers": 1}} | given))
    except ExoGymError as caught:
        error = caught  # keeps the frames of the run alive, as a notebook does
    assert (error is not None) == ("model" in given or given.get("val") == [])
    assert multiprocessing.active_children() == []


class Interrupting(nn.Module):
    """Ctrl-C in the middle of a stretch of node 1."""

    shared_attributes = ("calls",)

    def __init__(self):
        super().__init__()
        self.out, self.calls = nn.Linear(6, 2), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == 8:
            raise KeyboardInterrupt
        return self.out(x)


@pytest.mark.parametrize("name", BAD_LOSS_STRATEGIES)
def test_ctrl_c_within_a_stretch(name):
    with torch.random.fork_rng():
        trainer = LocalTrainer(Interrupting(), examples(), examples(8), loss_fn=F.cross_entropy)
    homes = [p.data_ptr() for p in trainer.model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(BAD_LOSS_STRATEGIES[name](), num_nodes=2, max_steps=12, batch_size=4, device="cpu")
    assert trainer.history[0]["step"] == 0 and trainer.history[-1]["step"] >= 2
    assert [p.data_ptr() for p in trainer.model.parameters()] == homes
    assert all(p.grad is None and p.isfinite().all() for p in trainer.model.parameters())
    start(model=trainer.model)


def test_a_metric_without_predictions_is_named():
    class OwnLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 2)

        def forward(self, batch):
            return F.cross_entropy(self.out(batch[0]), batch[1])

    with torch.random.fork_rng():
        trainer = LocalTrainer(OwnLoss(), examples(), examples(8), metrics={"error": F.cross_entropy})
    with pytest.raises(TrainingError, match="metric 'error' needs predictions and targets"):
        trainer.fit(SimpleReduceStrategy(), max_steps=1, device="cpu")


def test_an_error_of_a_checkpoint_is_raised_before_training(tmp_path):
    folder = tmp_path / "run"
    (folder / "step_0000000003").mkdir(parents=True)
    try:
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
            start(save_dir=folder, resume=True)
    finally:
        (folder / "step_0000000003").rmdir()
        folder.rmdir()


def fit(strategy=None, count=8, **options):
    with torch.random.fork_rng():
        model = nn.Linear(6, 2)
    trainer = LocalTrainer(model, examples(count), loss_fn=F.cross_entropy)
    options = {"num_nodes": 2, "max_steps": 1, "batch_size": 1, "device": "cpu"} | options
    trainer.fit(strategy or SimpleReduceStrategy(lr=0.1), **options)


WARNED = {
    "20 nodes share 8 examples: some nodes train on the same examples at every step": {"num_nodes": 20},
    "batch_size=9 is more than the 8 examples of all nodes: every step takes all .* (4 at most)": {"batch_size": 9},
    "batch_size=3 x gradient_accumulation=3 is more than the 8": {"batch_size": 3, "gradient_accumulation": 3},
    "first communicates after step 30, but the run has 1 step": {"strategy": DiLoCoStrategy(H=30)},
}


@pytest.mark.parametrize("words", WARNED)
def test_what_can_hardly_be_meant_is_a_warning_at_the_callers_line(words):
    with pytest.warns(UserWarning, match=words.replace("(", r"\(").replace(")", r"\)")) as caught:
        fit(**WARNED[words])
    assert [warning.filename for warning in caught] == [__file__]


def test_as_many_nodes_or_a_batch_as_large_as_the_examples_are_no_warning():
    fit(num_nodes=8)
    fit(batch_size=8)
    fit(batch_size=32)  # the default, which nobody chose
