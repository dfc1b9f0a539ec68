"""Hugging Face's real Trainer with `ExoGymCallback`: the bits of `LocalTrainer`, killed and resumed too."""

import os

import pytest
import torch
import transformers
from adapters import (
    BATCH,
    KILLED,
    LONG,
    LR,
    PARTS,
    SHORT,
    SHORT_STEPS,
    STRATEGIES,
    Net,
    Plain,
    described,
    ends_where_fit_does,
    examples,
    holds_the_law,
    in_world,
    kill,
    short,
)
from adapters import simulated as simulate
from torch.nn.functional import mse_loss

from exogym.core import progress
from exogym.data import IterableData
from exogym.errors import ArgumentError, DataError
from exogym.integrations.dealing import GradientWeight
from exogym.integrations.transformers import ExoGymCallback
from exogym.strategy import DeMoStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy
from exogym.testing import fingerprint


def gpt2():
    torch.manual_seed(3)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    model.loss_type = "ForCausalLM"
    return model


def windows():
    ids = torch.randint(16, (96, 8), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder, rank, steps, **options):
    given = {"max_steps": steps, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": PARTS}
    given |= {"learning_rate": LR, "weight_decay": 0.0, "optim": "adamw_torch_fused", "max_grad_norm": 0.0}
    given |= {"train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": "none", "use_cpu": True}
    given |= {"disable_tqdm": True, "logging_strategy": "no", "output_dir": str(folder / f"node-{rank}")}
    return transformers.TrainingArguments(**given | options)


class Killer(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            kill()


def trained(name, folder, rank, steps, make=Net, data=examples, killed=None, resume=None, **options):
    callback = ExoGymCallback(described(name, steps) if name == "demo" else STRATEGIES[name]())
    args = arguments(folder, rank, steps, **options)
    callbacks = [callback] if killed is None else [callback, Killer(killed)]
    model, given = make(), {}
    if name == "demo":
        given["optimizers"] = (callback.optimizer(model), None)
        args.lr_scheduler_type = "constant"
    trainer = transformers.Trainer(model, args, train_dataset=callback.deal(data()), callbacks=callbacks, **given)
    trainer.train(resume_from_checkpoint=resume and f"{args.output_dir}/checkpoint-{resume}")
    assert callback.nodes is not None and callback.nodes.step_count == steps
    return fingerprint(trainer.model), callback.nodes.history.last["tx_bytes"]


def law(names, num_nodes, steps, folder):
    holds_the_law(lambda name, rank, steps: trained(name, folder, rank, steps), names, num_nodes, steps, folder)


def test_the_trainer_of_transformers_has_the_bits_of_a_simulation(tmp_path):
    """Over three epochs; with dropout, BatchNorm, tied weights, a schedule, clipping and accumulation."""
    law(["ddp", "diloco", "demo"], 2, 14, tmp_path)


def alone(folder, make, steps=SHORT_STEPS, dataset=None, **given):
    callback = ExoGymCallback(STRATEGIES["ddp"]())
    args = arguments(folder, 0, steps)
    data = callback.deal(dataset or short())
    transformers.Trainer(model := make(), args, train_dataset=data, callbacks=[callback], **given).train()
    return model


def test_a_short_last_step_weights_examples_as_fit_does(tmp_path, monkeypatch):
    ends_where_fit_does(lambda: alone(tmp_path, Plain), monkeypatch)


def test_a_short_last_step_of_a_model_that_counts_targets_is_left_alone(tmp_path, monkeypatch):
    """The Trainer gives it the step's number of targets."""
    seen = []
    monkeypatch.setattr(GradientWeight, "__call__", lambda self, factor, parameters=(): seen.append(factor))
    alone(tmp_path, gpt2, 2, windows()[:SHORT])
    assert set(seen) == {1.0}
    alone(tmp_path, Plain, 2)
    assert set(seen) != {1.0}


def test_a_loss_outside_of_the_model_with_a_short_last_step_is_refused(tmp_path):
    def loss(outputs, labels, num_items_in_batch):
        return mse_loss(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    class Bare(Plain):
        def forward(self, x, labels=None):
            return {"logits": self.last(x)}

    with pytest.raises(ArgumentError, match=r"batches of \[4, 1\] examples.*dataloader_drop_last=True"):
        alone(tmp_path, Bare, compute_loss_func=loss)
    alone(tmp_path, Bare, 2, examples()[:16], compute_loss_func=loss)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_every_strategy_in_the_trainer_has_the_bits_of_a_simulation(num_nodes, tmp_path):
    law(list(STRATEGIES), num_nodes, LONG, tmp_path)


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_trainer_goes_on_with_the_same_bits(name, tmp_path):
    """From the Trainer's own checkpoint of a model of transformers with tied weights, in mid-epoch and mid-round."""
    given = {"make": gpt2, "data": windows, "save_strategy": "steps", "save_steps": 4}

    def train(rank, **options):
        return trained(name, tmp_path, rank, 14, **given, **options)[0]

    with pytest.raises(AssertionError, match="-9"):
        in_world(2, tmp_path / "killed", lambda rank: train(rank, killed=10))
    resumed = in_world(2, tmp_path / "again", lambda rank: train(rank, resume=8))
    assert resumed == [simulate(name, 2, 14, gpt2, windows)] * 2


def test_a_checkpoint_holds_the_averaged_model_too(tmp_path):
    """With a callback that saves `model_of(None)` in `on_save`, as docs/attach.md recommends."""

    def body(rank):
        class SaveAverage(transformers.TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                folder = f"{args.output_dir}/checkpoint-{state.global_step}/average"
                callback.nodes.model_of(None).save_pretrained(folder)

        callback = ExoGymCallback(FedAvgStrategy(H=100))
        args = arguments(tmp_path, rank, 5, save_strategy="steps", save_steps=4)
        trainer = transformers.Trainer(
            gpt2(), args, train_dataset=callback.deal(windows()), callbacks=[callback, SaveAverage()]
        )
        trainer.train()
        ends = [f"{args.output_dir}/checkpoint-4{part}" for part in ("", "/average")]
        return [transformers.GPT2LMHeadModel.from_pretrained(end).transformer.wpe.weight.tolist() for end in ends]

    (own, average), (other, same) = in_world(2, tmp_path / "world", body)
    assert average == same and own != other
    torch.testing.assert_close(torch.tensor(average), (torch.tensor(own) + torch.tensor(other)) / 2)


def test_a_short_run_with_the_default_outer_momentum_is_said(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "_printed", set())
    callback = ExoGymCallback(DiLoCoStrategy(H=3))
    args = arguments(tmp_path, 0, 7)
    transformers.Trainer(Net(), args, train_dataset=callback.deal(examples()), callbacks=[callback]).train()
    assert capfd.readouterr().err.count("exogym: DiLoCoStrategy takes 3 outer steps in 7 steps, too few") == 1


def test_the_examples_of_an_epoch_are_dealt_without_overlap(tmp_path):
    def body(rank):
        data = ExoGymCallback(DiLoCoStrategy(H=2)).deal(list(range(8)))
        found = []
        for epoch in range(2):
            data.set_epoch(epoch)
            found.append([data[k] for k in range(len(data))])
        return found

    one, other = in_world(2, tmp_path, body)
    for a, b in zip(one, other, strict=True):
        assert sorted(a + b) == list(range(8))
    assert one[0] != one[1]


def test_data_without_positions_are_refused_by_name():
    with pytest.raises(DataError, match=r"an iterable \(IterableData\), which has no positions"):
        ExoGymCallback(DiLoCoStrategy(H=2)).deal(IterableData(range(8)))


def test_options_that_cannot_be_right_are_refused(tmp_path):
    def train(dataset=None, strategy=None, more=(), **options):
        callback = ExoGymCallback(strategy or DiLoCoStrategy(H=2))
        data = callback.deal(examples()) if dataset is None else dataset
        args = arguments(tmp_path, 0, 2, **options)
        transformers.Trainer(Net(), args, train_dataset=data, callbacks=[callback, *more]).train()

    for options, said in (
        ({"train_sampling_strategy": "random"}, "has already distributed and shuffled"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"strategy": SimpleReduceStrategy(), "max_grad_norm": 1.0}, "clips each node's gradients"),
        ({"strategy": DiLoCoStrategy("sgd", lr=0.1, H=2)}, "the optimizer is AdamW"),
        ({"strategy": DeMoStrategy()}, "its own update rule"),
        ({"strategy": DiLoCoStrategy(H=2, warmup_steps=1)}, "the strategy describes a schedule as well"),
        (
            {"strategy": DiLoCoStrategy(H=2, lr_scheduler="cosine"), "lr_scheduler_type": "constant"},
            "leave lr_scheduler and warmup_steps out",
        ),
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "the workers would keep the examples of epoch 0",
        ),
        ({"more": [transformers.EarlyStoppingCallback()]}, "EarlyStoppingCallback with ExoGymCallback: it would stop"),
    ):
        with pytest.raises(ArgumentError, match=said):
            train(**options)

    def late(rank):
        args = arguments(tmp_path, rank, 2)
        assert args.world_size == 2  # the control: the Trainer sees the launch
        with pytest.raises(ArgumentError, match="create the ExoGymCallback before TrainingArguments"):
            transformers.Trainer(Net(), args, train_dataset=[], callbacks=[ExoGymCallback(DiLoCoStrategy(H=2))])

    in_world(2, tmp_path / "late", late)

    def shared(rank):
        callback = ExoGymCallback(DiLoCoStrategy(H=2))
        args = arguments(tmp_path, 0, 2)
        for data, said in (
            (examples(), "train on all examples"),
            (callback.deal(examples()), "same for several nodes"),
        ):
            with pytest.raises(ArgumentError, match=said):
                transformers.Trainer(Net(), args, train_dataset=data, callbacks=[callback]).train()

    in_world(2, tmp_path / "shared", shared)


def test_a_schedule_that_has_no_effect_is_refused(tmp_path):
    callback = ExoGymCallback(DeMoStrategy())
    model, args = Net(), arguments(tmp_path, 0, 2)
    given = {"optimizers": (callback.optimizer(model), None), "train_dataset": callback.deal(examples())}
    with pytest.raises(ArgumentError, match="lr_scheduler_type='constant', and pass lr_scheduler to the strategy"):
        transformers.Trainer(model, args, callbacks=[callback], **given).train()


def test_a_process_chooses_its_gpu_before_cuda_starts(monkeypatch):
    """CUDA reads CUDA_VISIBLE_DEVICES once. This machine may have no GPU, so torch's answers are given here."""
    seen = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)

    def accelerator(check_available=False):
        if check_available:
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr("torch.accelerator.current_accelerator", accelerator)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("exogym.integrations.joining.LAUNCHED", ())
    ExoGymCallback(DiLoCoStrategy(H=2))
    assert seen[0] == "6"


@pytest.mark.parametrize(("processes", "backend"), [(2, "nccl"), (3, "gloo")])
def test_processes_with_a_gpu_each_meet_with_nccl(monkeypatch, processes, backend):
    """Each then sees one GPU alone, but the host has two. torch's answers are given, as above."""
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "4,6"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: os.environ["CUDA_VISIBLE_DEVICES"].count(",") + 1)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.accelerator.set_device_index", lambda device: None)
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda backend: True)

    class Met(Exception):
        pass

    def meet(backend):
        raise Met(backend)

    monkeypatch.setattr("exogym.core.engine.world.join_group", meet)
    with pytest.raises(Met, match=backend):
        ExoGymCallback(DiLoCoStrategy(H=2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
