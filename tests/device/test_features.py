"""What a run can ask for, on the device as on the CPU: precision, models, loaders, processes and loops of users."""

import pytest
import torch
from device.small import classes, fit, network, weights_of
from torch import nn
from torch.utils.data import TensorDataset

import exogym
from exogym import LocalTrainer
from exogym.callbacks import EvaluateNodes
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy

OPTIONS = {
    "accumulation": {"gradient_accumulation": 2},
    "absent nodes": {"faults": "absent"},
    "bf16": {"precision": "bf16"},
    "clipping": {"strategy": SimpleReduceStrategy(lr=0.05, max_norm=0.1)},
    "evaluation of nodes": {"callbacks": [EvaluateNodes()]},
    "fp16": {"precision": "fp16"},
    "loader's processes": {"dataloader_kwargs": {"num_workers": 1, "pin_memory": True}},
    "micro-batches": {"minibatch_size": 2},
    "skipped nodes": {"on_nonfinite": "skip"},
    "vmap": {"compute": "vmap"},
    "vmap, bf16": {"compute": "vmap", "precision": "bf16"},
}


@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "no float64"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, narrow, fake):
    options = dict(OPTIONS[name])
    if "faults" in options:
        options["faults"] = Faults(absent={1: [(2, 4)]})
    if "precision" in options:  # with Adam, a gradient near 0 that rounds to the other sign is a whole step
        options["strategy"] = SimpleReduceStrategy("sgd", lr=0.1)
    fake.device.set_draws_as_cpu(True)
    fake.device.set_float64(not narrow)
    here, there = (fit(network(), device, **options) for device in ("cpu", "fake"))
    tolerance = 0.02 if "precision" in options else 0.0  # autocast's lists of operations differ
    assert float((weights_of(here) - weights_of(there)).abs().max()) <= tolerance


def texts(count=24, length=16, words=32):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (count, length), generator=draw)
    return [{"input_ids": x, "labels": x} for x in ids]


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), texts()


def whisper():
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=32, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=20,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    sounds = torch.randn(24, 8, 40, generator=draw)
    return transformers.WhisperForConditionalGeneration(config), [
        {"input_features": x, "labels": text["labels"]} for x, text in zip(sounds, texts(), strict=True)
    ]


def convolutions():
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(24, 1, 8, 8, generator=draw)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)), TensorDataset(
        images, torch.randint(10, (24,), generator=draw)
    )


@pytest.mark.parametrize("make", [gpt2, whisper, convolutions])
def test_models(make, fake):
    fake.device.set_draws_as_cpu(True)
    found = []
    for device in ("cpu", "fake"):
        torch.manual_seed(0)
        model, data = make()
        loss_fn = nn.functional.cross_entropy if make is convolutions else None
        found.append(weights_of(fit(model, device, loss_fn, data=data, max_steps=3)))
    assert torch.allclose(*found, atol=1e-3)


def test_a_loop_of_the_user(fake):
    found = []
    for device in ("cpu", "fake"):
        model = network().to(device)
        nodes = exogym.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), DiLoCoStrategy(H=2), total_steps=4)
        for x, y in nodes.loader(classes(16), batch_size=4):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            nodes.step(loss)
        nodes.finish()
        found.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_a_model_that_does_not_fit_is_refused_with_the_devices_memory(fake):
    fake.device.set_limit(fake.device.memory()[0] + (1 << 20))
    with pytest.raises(exogym.errors.ArgumentError, match=r"0\.001\d* GB are free"):
        LocalTrainer(nn.Linear(6, 60_000), classes(), loss_fn=nn.functional.cross_entropy).fit(
            DiLoCoStrategy(lr=0.05, H=3), num_nodes=2, max_steps=3, device="fake", progress=False
        )
