"""Lightning's real Trainer with `ExoGymCallback`: the bits of `LocalTrainer`, killed and resumed too."""

import pytest
import pytorch_lightning as lightning
import torch
import torchmetrics
from adapters import (
    BATCH,
    KILLED,
    LONG,
    PARTS,
    SHORT_STEPS,
    STRATEGIES,
    Net,
    Plain,
    adamw,
    described,
    ends_where_fit_does,
    examples,
    holds_the_law,
    in_world,
    kill,
    short,
)
from adapters import schedule as scheduled
from adapters import simulated as simulate
from processes import end, launch

from exogym.core import progress
from exogym.errors import ArgumentError, CheckpointError
from exogym.integrations.lightning import ExoGymCallback
from exogym.strategy import DeMoStrategy, DiLoCoStrategy, SimpleReduceStrategy
from exogym.testing import fingerprint

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning")  # Lightning's own


class Module(lightning.LightningModule):
    def __init__(self, callback, name, steps):
        super().__init__()
        self.net, self.name, self.steps, self.callback = Net(), name, steps, callback

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        if self.name == "demo":
            return self.callback.optimizer(self)
        optimizer = adamw(self)
        return [optimizer], [{"scheduler": scheduled(optimizer, self.steps), "interval": "step"}]


class Killer(lightning.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            kill()


def quiet(folder, rank, **options):
    given = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    given |= {"enable_checkpointing": False, "default_root_dir": folder / f"node-{rank}"}
    return given | {"accumulate_grad_batches": PARTS} | options


def trained(name, folder, rank, steps, module=Module, callbacks=(), resume=None, **options):
    callback = ExoGymCallback(described(name, steps) if name == "demo" else STRATEGIES[name]())
    given = quiet(folder, rank, max_steps=steps, callbacks=[callback, *callbacks], **options)
    trainer = lightning.Trainer(**given)
    model = module(callback, name, steps)
    trainer.fit(
        model,
        callback.loader(examples(), BATCH, gradient_accumulation=PARTS),
        ckpt_path=resume and folder / f"node-{rank}" / resume,
    )
    assert callback.nodes is not None and callback.nodes.step_count == steps
    if resume is None and "mean" in trainer.callback_metrics:  # torchmetrics would mix the nodes' numbers
        own = trainer.callback_metrics["loss"] + rank
        assert trainer.callback_metrics["mean"] == own
    return fingerprint(model.net), callback.nodes.history.last["tx_bytes"]


def law(names, num_nodes, steps, folder, **options):
    train = lambda name, rank, steps: trained(name, folder, rank, steps, **options)  # noqa: E731
    holds_the_law(train, names, num_nodes, steps, folder)


def test_lightnings_trainer_has_the_bits_of_a_simulation(tmp_path):
    """Over three epochs; with dropout, BatchNorm, tied weights, a schedule, clipping and accumulation."""
    law(["ddp", "diloco", "demo"], 2, 14, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_every_strategy_in_lightning_has_the_bits_of_a_simulation(num_nodes, tmp_path):
    law(list(STRATEGIES), num_nodes, LONG, tmp_path)


class Epochs(Module):
    """Saves by hand at the end of an epoch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % PARTS == 1 and self.trainer.global_step == 6:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/at-6.ckpt")


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_trainer_goes_on_with_the_same_bits(name, tmp_path):
    """From the Trainer's own checkpoint at the end of an epoch, in mid-round."""

    def train(rank, **options):
        return trained(name, tmp_path, rank, 14, **options)[0]

    with pytest.raises(AssertionError, match="-9"):
        in_world(2, tmp_path / "killed", lambda rank: train(rank, module=Epochs, callbacks=[Killer(10)]))
    resumed = in_world(2, tmp_path / "again", lambda rank: train(rank, resume="at-6.ckpt"))
    assert resumed == [simulate(name, 2, 14)] * 2


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
def test_checkpoints_of_model_checkpoint_resume(tmp_path):
    """Lightning's callback saves every four steps, with a validation in each epoch; the strategy's own optimizer."""

    class Validated(Module):
        def __init__(self, *args):
            super().__init__(*args)
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch, batch_idx):
            torch.rand(3)  # a validation draws random numbers
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            self.mean(loss + self.callback.rank)
            self.log("mean", self.mean)

        def val_dataloader(self):
            return torch.utils.data.DataLoader(examples()[:8], batch_size=8)

    def save():
        saver = lightning.callbacks.ModelCheckpoint(every_n_train_steps=4, save_top_k=-1, filename="{step}")
        return {"module": Validated, "callbacks": [saver], "enable_checkpointing": True}

    def train(rank, **more):
        options = save()
        options["callbacks"] += more.pop("callbacks", [])
        return trained("demo", tmp_path, rank, 14, **options, **more)[0]

    with pytest.raises(AssertionError, match="-9"):
        in_world(2, tmp_path / "killed", lambda rank: train(rank, callbacks=[Killer(10)]))
    resumed = in_world(2, tmp_path / "again", lambda rank: train(rank, resume="checkpoints/step=8.ckpt"))
    assert resumed == [simulate("demo", 2, 14)] * 2


@pytest.mark.parametrize(("count", "sizes"), [(10, [4, 4, 2, 2]), (11, [4, 4, 3, 3]), (13, [4, 4, 2, 3])])
def test_a_short_last_step_has_as_many_batches_as_others(count, sizes, tmp_path):
    """Otherwise the Trainer would take no step with them, and would get them again for ever."""
    found = []

    class Counted(Module):
        def training_step(self, batch, batch_idx):
            found.append(len(batch["x"]))
            assert len(found) <= 8
            return super().training_step(batch, batch_idx)

    callback = ExoGymCallback(DiLoCoStrategy(H=2))
    trainer = lightning.Trainer(**quiet(tmp_path, 0, max_steps=4, callbacks=[callback]))
    trainer.fit(Counted(callback, "diloco", 4), callback.loader(examples()[:count], BATCH, gradient_accumulation=PARTS))
    assert found == sizes * 2 and callback.nodes.step_count == 4


def test_a_short_last_step_weights_examples_as_fit_does(tmp_path, monkeypatch):
    class Short(Module):
        def __init__(self, *given):
            super().__init__(*given)
            self.net = Plain()

    def train():
        callback = ExoGymCallback(STRATEGIES["ddp"]())
        trainer = lightning.Trainer(**quiet(tmp_path, 0, max_steps=SHORT_STEPS, callbacks=[callback]))
        module = Short(callback, "ddp", SHORT_STEPS)
        trainer.fit(module, callback.loader(short(), BATCH, gradient_accumulation=PARTS))
        return module.net

    ends_where_fit_does(train, monkeypatch)


def test_a_checkpoint_holds_the_averaged_model_too(tmp_path):
    """With a callback that adds `model_of(None)` in `on_save_checkpoint`, as docs/attach.md recommends.

    After a step of DDP, the averaged model is every node's model.
    """

    def body(rank):
        class SaveAverage(lightning.Callback):
            def on_save_checkpoint(self, trainer, module, checkpoint):
                checkpoint["average"] = module.callback.nodes.model_of(None).state_dict()

        found = []
        for name in ("diloco", "ddp"):
            trained(name, tmp_path / name, rank, 7, module=Epochs, callbacks=[SaveAverage()])
            saved = torch.load(tmp_path / name / f"node-{rank}" / "at-6.ckpt", weights_only=True)
            found += [saved[part]["net.last.weight"].tolist() for part in ("state_dict", "average")]
        return found

    first, second = in_world(2, tmp_path / "world", body)
    assert first[1] == second[1] and first[0] != second[0] and first[0] != first[1]
    assert first[2] == first[3] == second[2] == second[3]


def test_a_short_run_with_the_default_outer_momentum_is_said(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "_printed", set())
    callback = ExoGymCallback(DiLoCoStrategy(H=4))
    trainer = lightning.Trainer(**quiet(tmp_path, 0, max_steps=6, callbacks=[callback]))
    trainer.fit(Module(callback, "diloco", 6), callback.loader(examples(), BATCH, gradient_accumulation=PARTS))
    assert capfd.readouterr().err.count("exogym: DiLoCoStrategy takes 2 outer steps in 6 steps, too few") == 1


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.net(**batch)["loss"] * (1 / PARTS))
        if batch_idx % PARTS == PARTS - 1:
            self.optimizers().step()
            self.lr_schedulers().step()


def test_manual_optimization_has_the_bits_of_a_simulation(tmp_path):
    options = {"module": Manual, "accumulate_grad_batches": 1}
    assert trained("diloco", tmp_path, 0, 8, **options)[0] == simulate("diloco", 1, 8)


def test_lightnings_clipping_is_right_for_local_steps(tmp_path):
    callback = ExoGymCallback(DiLoCoStrategy(H=5))
    trainer = lightning.Trainer(**quiet(tmp_path, 0, max_steps=8, callbacks=[callback], gradient_clip_val=0.5))
    module = Module(callback, "diloco", 8)
    trainer.fit(module, callback.loader(examples(), BATCH, gradient_accumulation=PARTS))
    assert fingerprint(module.net) == simulate("diloco", 1, 8)


class Two(Manual):
    def configure_optimizers(self):
        return [adamw(self.net.first), adamw(self.net.last)]


REFUSED = [
    ({"precision": "16-true"}, "precision='16-true'"),
    ({"gradient_clip_val": 1.0, "use": SimpleReduceStrategy()}, "clips each node's gradients"),
    ({"gradient_clip_val": 1.0, "precision": "bf16-mixed"}, "mixed precision does not clip"),
    ({"overfit_batches": 2}, "overfit_batches=2"),
    ({"limit_train_batches": 3}, "limit_train_batches=3.*integer multiple of 2"),
    ({"val_check_interval": 3}, "val_check_interval=3.*integer multiple of 2"),
    ({"accumulate_grad_batches": 3}, "pass gradient_accumulation=3 to callback.loader"),
    ({"callbacks": [lightning.callbacks.EarlyStopping("loss")]}, "EarlyStopping with ExoGymCallback: it would stop"),
    ({"max_time": "00:01:00:00"}, "Timer with ExoGymCallback"),
    ({"callbacks": [lightning.callbacks.StochasticWeightAveraging(0.1)]}, "averages the model itself"),
    ({"callbacks": [lightning.callbacks.GradientAccumulationScheduler({2: 4})], "accumulate_grad_batches": 1},
     "are distributed"),
    ({"use": DiLoCoStrategy(H=2, lr_scheduler=lambda step: 1.0)}, "both describe a schedule"),
    ({"use": DeMoStrategy()}, "its own update rule"),
    ({"module": Two, "accumulate_grad_batches": 1}, "returns 2 optimizers"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The:UserWarning")
@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_options_that_cannot_be_right_are_refused(options, said, tmp_path):
    options = dict(options)
    module = options.pop("module", Module)
    callback = ExoGymCallback(options.pop("use", DiLoCoStrategy(H=2)))
    options["callbacks"] = [callback, *options.get("callbacks", [])]
    trainer = lightning.Trainer(**quiet(tmp_path, 0, max_steps=2, **options))
    with pytest.raises(ArgumentError, match=said):
        trainer.fit(module(callback, "diloco", 2), callback.loader(examples(), BATCH, gradient_accumulation=PARTS))


def test_what_several_nodes_would_do_wrong_is_refused(tmp_path):
    def body(rank):
        callback = ExoGymCallback(DiLoCoStrategy(H=2))

        def train(data, folder, **options):
            given = quiet(folder, rank, max_steps=2, callbacks=[callback], accumulate_grad_batches=1) | options
            lightning.Trainer(**given).fit(Module(callback, "diloco", 2), data)

        with pytest.raises(ArgumentError, match="every node would train on all examples"):
            train(torch.utils.data.DataLoader(examples(), 4), tmp_path)
        shared = {"default_root_dir": tmp_path, "enable_checkpointing": True}
        with pytest.raises(ArgumentError, match=r"default_root_dir=.*the same for several nodes"):
            train(callback.loader(examples(), 4), tmp_path, **shared)
        logged = {"logger": lightning.loggers.CSVLogger(tmp_path)}
        with pytest.raises(ArgumentError, match=r"save_dir=.*the same for several nodes"):
            train(callback.loader(examples(), 4), tmp_path / str(rank), **logged)
        with pytest.raises(ArgumentError, match="strategy=DDPStrategy with 1 processes"):
            train(callback.loader(examples(), 4), tmp_path / str(rank), strategy="ddp")
        assert lightning.utilities.rank_zero_only.rank == 0

    in_world(2, tmp_path / "world", body)


def test_a_process_that_lightning_started_is_no_node(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ArgumentError, match="pass devices=1 to the Trainer"):
        ExoGymCallback(DiLoCoStrategy(H=2))


def test_a_trainer_without_the_callback_is_refused(tmp_path):
    callback = ExoGymCallback(DiLoCoStrategy(H=2))
    loader = callback.loader(examples(), BATCH, gradient_accumulation=PARTS)
    trainer = lightning.Trainer(**quiet(tmp_path, 0, max_steps=2))
    with pytest.raises(ArgumentError, match=r"pass callbacks=\[callback\] to the Trainer"):
        trainer.fit(Module(callback, "diloco", 2), loader)


def test_a_checkpoint_without_the_nodes_state_is_refused(tmp_path):
    def train(resume=None, steps=2):
        callback = ExoGymCallback(DiLoCoStrategy(H=2))
        trainer = lightning.Trainer(**quiet(tmp_path, 0, max_steps=steps, callbacks=[callback]))
        trainer.fit(
            Module(callback, "diloco", 4), callback.loader(examples(), 4, gradient_accumulation=2), ckpt_path=resume
        )
        trainer.save_checkpoint(tmp_path / "over.ckpt")

    train()
    with pytest.raises(CheckpointError, match="the Trainer is at step 2, but the node is at step 0"):
        train(tmp_path / "over.ckpt", 4)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import pytorch_lightning
from pathlib import Path
from integrations.test_lightning import trained

rank, steps = int(__import__("os").environ["RANK"]), 14
Path(f"{rank}.txt").write_text(trained("streaming diloco", Path("."), rank, steps)[0])
"""


@pytest.mark.slow
def test_under_torchrun_itself(tmp_path):
    """Lightning, imported before the callback hides the launch, sees neither torchrun nor a second process."""
    launcher = launch(2, tmp_path, SCRIPT)
    assert end(launcher) == 0, (tmp_path / "log").read_text()
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == [simulate("streaming diloco", 2, 14)] * 2
