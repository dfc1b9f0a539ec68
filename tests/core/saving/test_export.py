"""A model as a safetensors file, and back."""

import pytest
import torch
from torch import nn

from exogym import LocalTrainer, load_model, save_model
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
