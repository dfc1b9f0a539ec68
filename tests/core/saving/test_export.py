"""A model as a safetensors file or folder, and back."""

import json
import os
import random

import pytest
import torch
from corrupted import FEW, MANY, impatient, mutated, read_or_refused
from torch import nn

from exogym import LocalTrainer, load_model, save_model
from exogym.core.record.history import History
from exogym.errors import ArgumentError, ModelError
from exogym.models import CharGPT
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint, small_problem


def test_the_final_model_comes_back_bit_by_bit(tmp_path):
    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=nn.functional.mse_loss)
    final = trainer.fit(DiLoCoStrategy(H=2, lr=0.01), num_nodes=2, max_steps=4, batch_size=8, device="cpu")
    path = save_model(final, tmp_path / "new" / "final_model.safetensors")
    again, _ = small_problem(seed=1)
    assert fingerprint(again) != fingerprint(final)
    assert fingerprint(load_model(again, path)) == fingerprint(final)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_tied_weights_come_back_tied(tmp_path):
    torch.manual_seed(0)
    model = CharGPT(vocab_size=11, block_size=8)
    torch.manual_seed(1)
    other = CharGPT(vocab_size=11, block_size=8)
    load_model(other, save_model(model, tmp_path / "m.safetensors"))
    assert fingerprint(other) == fingerprint(model)
    pointers = [[p.data_ptr() for p in m.state_dict(keep_vars=True).values()] for m in (model, other)]
    assert len(set(pointers[0])) == len(set(pointers[1]))


def test_another_model_is_named_and_nothing_is_changed(tmp_path):
    path = save_model(nn.Sequential(nn.Linear(3, 2)), tmp_path / "m.safetensors")
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = fingerprint(other)
    with pytest.raises(ModelError, match=r"1.weight: only in the model[\s\S]*0.weight: \(2, 3\) in the file, \(4, 3\)"):
        load_model(other, path)
    assert fingerprint(other) == before


def test_files_that_cannot_be_read_or_written(tmp_path):
    path = save_model(nn.Linear(3, 2), tmp_path / "m.safetensors")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_model(nn.Linear(3, 2), path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_model(nn.Linear(3, 2), tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="could not be written"):
        save_model(nn.Linear(3, 2), tmp_path / "file" / "m.safetensors")


# Hugging Face's layout


def gpt(seed: int = 0) -> CharGPT:
    torch.manual_seed(seed)
    return CharGPT(vocab_size=11, block_size=8)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch reads in one process
@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 30, 1), (100_000, 6), (1, 0)])
def test_shards_come_back_and_torch_reads_them(shard_bytes, files, tmp_path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    model, folder = gpt(), tmp_path / "new" / "hf"
    assert save_model(model, folder, shard_bytes=shard_bytes) == folder
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (folder / "model.safetensors.index.json").exists() == (len(names) > 1)
    assert len(names) == (files or len(model.state_dict()))
    largest = max(x.nbytes for x in model.state_dict().values())
    assert all(path.stat().st_size < max(shard_bytes, largest) + 10_000 for path in folder.glob("*.safetensors"))
    assert fingerprint(load_model(gpt(1), folder)) == fingerprint(model)
    state = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    with pytest.raises(ArgumentError, match="exists: pass a new folder"):
        save_model(model, folder, shard_bytes=shard_bytes)


def test_folders_that_are_no_model(tmp_path):
    for wrong in (0, 2.5, "5GB", True):
        with pytest.raises(ArgumentError, match=r"shard_bytes=.* must be a whole number"):
            save_model(gpt(), tmp_path / "m", shard_bytes=wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="could not be written"):
        save_model(gpt(), tmp_path / "file" / "m", shard_bytes=5)
    save_model(gpt(), tmp_path / "outside.safetensors")
    folder = save_model(gpt(), tmp_path / "m", shard_bytes=100_000)
    index = folder / "model.safetensors.index.json"
    for content in ("", "[]", "{}", json.dumps({"weight_map": {"a": "../outside.safetensors"}}), '{"weight_map": [1]}'):
        index.write_text(content)
        with pytest.raises(ArgumentError, match="cannot be read"):
            load_model(gpt(), folder)
    index.unlink()
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_model(gpt(), folder)


def test_links_to_files_are_read_and_pipes_are_not(tmp_path):
    """Hugging Face's cache has links to files outside the folder."""
    model, folder = gpt(), save_model(gpt(), tmp_path / "m", shard_bytes=100_000)
    file = sorted(folder.glob("*.safetensors"))[1]
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    assert fingerprint(load_model(gpt(1), folder)) == fingerprint(model)
    file.unlink()
    os.mkfifo(file)
    os.mkfifo(tmp_path / "pipe")
    for path in (folder, tmp_path / "pipe"):
        with (
            impatient(),
            pytest.raises(ArgumentError, match="is a folder, a pipe or a device, but must be a regular file"),
        ):
            load_model(gpt(1), path)
    with impatient(), pytest.raises(ArgumentError, match="is a folder, a pipe or a device, but must be a regular file"):
        History.load(tmp_path / "pipe")
    (folder / "model.safetensors.index.json").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")
    with impatient(), pytest.raises(ArgumentError, match="is a folder, a pipe or a device, but must be a regular file"):
        load_model(gpt(1), folder)


OUTSIDE = 7.0
ODD_NAMES = [
    *("../outside.safetensors", "{up}/outside.safetensors", "a/../../outside.safetensors", "..\\outside.safetensors"),
    *("..", ".", "", "~", "\0", "x" * 9999, "pipe", "/dev/zero", None, 3, ["x"], {}),
]


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_folders_are_refused_or_read(count, tmp_path):
    """In the index, which then also names files outside, and in the headers and numbers of the files."""

    def make():
        return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))

    model = make()
    everything = {name: torch.full_like(x, OUTSIDE) for name, x in model.state_dict().items()}
    outside = make()
    outside.load_state_dict(everything)
    save_model(outside, tmp_path / "outside.safetensors")
    folder = save_model(model, tmp_path / "m", shard_bytes=100)
    os.mkfifo(folder / "pipe")
    wholes = {path: path.read_bytes() for path in sorted(folder.glob("model*"))}
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    outcomes = []
    for seed in range(count):
        draw = random.Random(seed)
        path = draw.choice([index, *wholes])
        hot = [] if path == index else [range(8), range(8 + int.from_bytes(wholes[path][:8], "little"))]
        if path == index and seed % 2:
            name = draw.choice(ODD_NAMES)
            named = name.format(up=tmp_path) if isinstance(name, str) else name
            weights = places["weight_map"] | {draw.choice(list(places["weight_map"])): named}
            path.write_text(json.dumps(places | {"weight_map": weights}))
        else:
            path.write_bytes(mutated(draw, wholes[path], hot))
        outcome, found = read_or_refused(lambda: load_model(make(), folder), folder)
        outcomes.append(outcome)
        assert found is None or not any(bool((x == OUTSIDE).all()) for x in found.parameters()), seed
        path.write_bytes(wholes[path])
    assert {*outcomes} == {"read", "refused"}


@pytest.mark.slow
def test_transformers_loads_the_folder(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    folder = save_model(model, tmp_path / "hf", shard_bytes=3000)
    model.config.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1 and fingerprint(again) == fingerprint(model)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=3000)
    other = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ModelError, match=r"lm_head.weight: only in the model"):  # transformers leaves tied names out
        load_model(other, tmp_path / "theirs")
