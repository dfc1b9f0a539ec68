"""Checkpoints that were altered or made up: one error that names the file, never a raw one, never other bits."""

import json
import os
import random
import shutil
import socket

import numpy as np
import pytest
import torch
from checkpoints import RUNS, examples, fit, network, sign
from safetensors.torch import load_file, save_file

from exogym import LocalTrainer, Placement
from exogym.core.saving.checkpoint import list_checkpoints, load
from exogym.errors import CheckpointError
from exogym.strategy import FedAvgStrategy, OptimSpec
from exogym.testing import fingerprint

OPTIONS = {"checkpoint_interval": 6, "placement": Placement(keep_checkpoints=2), "max_steps": 9}


def make():
    return FedAvgStrategy(OptimSpec("sgd", lr=0.1, momentum=0.9), H=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 6 and 9, and the mark of what goes on from either."""
    folder = tmp_path_factory.mktemp("saved")
    fit(make(), folder, **OPTIONS)
    assert [path.name for path in list_checkpoints(folder)] == ["step_0000000006", "step_0000000009"]
    return folder, go_on(folder, folder.with_name("first"))


def go_on(folder, copy, only_newest=False):
    """Go on from a copy of `folder` for three steps; return the weights it ends in."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, symlinks=True, copy_function=copy_plain)
    return resumed(copy, only_newest)


def resumed(copy, only_newest=False):
    if only_newest:
        shutil.rmtree(list_checkpoints(copy)[0])
    trainer = LocalTrainer(network(), examples(), None, loss_fn=torch.nn.functional.cross_entropy)
    trainer.fit(make(), num_nodes=3, batch_size=4, device="cpu", save_dir=copy, resume=True, max_steps=12)
    return fingerprint(trainer.model)


def copy_plain(source, target, **options):
    if os.path.isfile(source) and not os.path.islink(source):
        shutil.copy2(source, target)


# Mutated: what disks and people do. Nothing is signed again.


def mutate(draw, path):
    """Change one file of a checkpoint at random."""
    file = path / draw.choice(sorted(os.listdir(path)))
    data = bytearray(file.read_bytes())
    kind = draw.choice(["flip", "cut", "insert", "zeros", "swap", "remove", "empty", "double"])
    at = draw.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = draw.randbytes(draw.randint(1, 99))
    elif kind == "zeros":
        end = min(len(data), at + draw.randint(1, 4096))
        data[at:end] = bytes(255 - x for x in data[at:end])
    elif kind == "swap":
        other = path / draw.choice(sorted(set(os.listdir(path)) - {file.name}))
        data = bytearray(other.read_bytes())
    elif kind == "empty":
        data = bytearray()
    elif kind == "double":
        data += bytes(data)
    file.unlink()
    if kind != "remove":
        file.write_bytes(data)
    return f"{kind} {file.name}"


def test_150_mutated_checkpoints_are_known_as_such(saved, tmp_path):
    folder, _ = saved
    for seed in range(150):
        draw, copy = random.Random(seed), tmp_path / "copy"
        shutil.copytree(folder / "step_0000000009", copy)
        what = mutate(draw, copy)
        with pytest.raises(CheckpointError) as caught:
            load(copy)
        assert str(copy) in str(caught.value), (seed, what)
        shutil.rmtree(copy)


# Forged: all sums are those of what is there.

NUMBERS = [-1, 2**70, 1e300, "7", None, True, [], {}, 3.5, float("nan")]


def forge_tensors(draw, file):
    """Change names, shapes or dtypes in a file of tensors."""
    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    x = tensors[name]
    kind = draw.choice(["drop", "rename", "shape", "dtype", "extra", "stranger", "scalar", "exchange"])
    if kind == "drop":
        del tensors[name]
    elif kind == "rename":
        tensors[draw.choice([f"{name}x", name.upper() + "_", f"9/{name}", f"../{name}", "", f"01/{name}"])] = (
            tensors.pop(name)
        )
    elif kind == "shape":
        tensors[name] = draw.choice([x[None], torch.cat([x.reshape(-1), x.reshape(-1)]), x.reshape(-1)[:0]]).clone()
    elif kind == "dtype":
        others = (torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16)
        tensors[name] = x.to(draw.choice([dtype for dtype in others if dtype != x.dtype]))
    elif kind == "extra":
        tensors[f"{name}.more"] = x.clone()
    elif kind == "stranger":
        tensors[draw.choice(["0/a", "a", "history.a", "driver.", "0/params.1", "7/params.0"])] = torch.ones(1)
    elif kind == "scalar":
        tensors[name] = torch.ones(()) if x.dim() or x.dtype != torch.float32 else torch.ones(3)
    else:
        other = draw.choice(sorted(n for n in tensors if (tensors[n].shape, tensors[n].dtype) != (x.shape, x.dtype)))
        tensors[name], tensors[other] = tensors[other], x
    save_file({k: v.contiguous() for k, v in tensors.items()}, file)
    return f"{kind} {name!r} in {file.name}"


def forge_description(draw, path, meta):
    """Change a counter, a choice or a part of the description."""
    choices = ["step", "begun_end", "logged", "evaluated", "wall_s", "history", "description", "format"]
    name = draw.choice([*choices, "history", "chosen", "described", "drop"])
    if name == "drop":
        name = draw.choice(choices)
        del meta[name]
    elif name == "history":
        inner = draw.choice(sorted(meta["history"]))
        meta["history"][inner] = draw.choice([x for x in NUMBERS if x != meta["history"][inner]])
    elif name == "chosen":
        inner = draw.choice(["compute", "micro_batch_size", "speeds"])
        meta["description"]["chosen"] = draw.choice([None, [], {inner: 3}, {inner: "vmap", "compute": "vmap"}])
    elif name == "described":
        inner = draw.choice(sorted(set(meta["description"]) - {"limits", "placement"}))
        meta["description"][inner] = draw.choice(["other", -1, None])
    else:
        # (None is what begun_end is; a wall_s of 3.5 or True-for-1 seconds is one.)
        fine = {"begun_end": (None,), "wall_s": (3.5, 1e300)}.get(name, ())
        meta[name] = draw.choice([x for x in NUMBERS if not any(x is y or x == y for y in fine)])
    return f"{name} in run.json"


def forge_files(draw, path, meta):
    """Put something that is no plain file of its name."""
    file = path / draw.choice(sorted(set(os.listdir(path))))
    kind = draw.choice(["link", "pipe", "device", "socket", "folder", "outside", "hole", "overlap"])
    if kind in ("outside", "hole", "overlap"):
        (rows,) = path.glob("rows-*")
        if kind == "outside":
            name = draw.choice(["../rows-0-2.safetensors", "/etc/passwd", "a\0b", "rows-0-2.safetensors/..", "x"])
            meta["sha256"][name] = "0" * 64
        elif kind == "hole":
            meta["sha256"].pop(draw.choice(sorted(meta["sha256"])))
        else:
            shutil.copy(rows, path / "rows-2-4.safetensors")
            meta["sha256"]["rows-2-4.safetensors"] = meta["sha256"][rows.name]
        return f"{kind} in run.json", False
    held = file.with_name("held")
    file.rename(held)
    if kind == "link":
        file.symlink_to(draw.choice([held, "/dev/zero", "nowhere"]))
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        if os.geteuid() == 0:
            os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        else:
            file.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(path)  # an address has 108 bytes at most
            try:
                server.bind(file.name)
            finally:
                os.chdir(here)
    else:
        file.mkdir()
    return f"{kind} at {file.name}", None


def forge(draw, path):
    meta = json.loads((path / "run.json").read_text())
    kind = draw.choice(["tensors", "tensors", "tensors", "description", "files"])
    if kind == "files":
        what, signed = forge_files(draw, path, meta)
        if signed is False:
            resign(path, meta)
        return what
    if kind == "tensors":
        what = forge_tensors(draw, draw.choice(sorted(path.glob("*.safetensors"))))
    else:
        what = forge_description(draw, path, meta)
    sign(path, meta)
    return what


def resign(path, meta):
    from exogym.core.saving.checkpoint_files import sum_of

    meta = {name: value for name, value in meta.items() if name != "sha256_of_this"}
    (path / "run.json").write_text(json.dumps(meta | {"sha256_of_this": sum_of(meta)}))


@pytest.mark.parametrize("part", range(10))
def test_100_forged_checkpoints_never_train_on(part, saved, tmp_path):
    """Alone each is an error that names its place; where there is one before, that is used."""
    folder, wanted = saved
    for seed in range(10 * part, 10 * part + 10):
        run = tmp_path / f"run {seed}"
        shutil.copytree(folder, run)
        what = forge(random.Random(seed), run / "step_0000000009")
        another_run = "described" in what
        if seed % 5 == 0 and not another_run:
            copy = tmp_path / "before"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            forge(random.Random(seed), copy / "step_0000000009")
            assert resumed(copy) == wanted, what
        with pytest.raises(CheckpointError) as caught:
            resumed(run, only_newest=True)
            pytest.fail(f"seed {seed} was accepted: {what}")
        assert str(run) in str(caught.value), (seed, what, str(caught.value))


@pytest.mark.parametrize("name", RUNS)
def test_every_tensor_is_missed(name, tmp_path):
    """One by one, each tensor of a checkpoint is left out, also of a user's own strategy."""
    make_it, options = RUNS[name]
    options = options | {"max_steps": 6}
    fit(make_it(), tmp_path / "run", **options)
    (path,) = list_checkpoints(tmp_path / "run")
    (rows_file,) = path.glob("rows-*")
    kept = {file: load_file(file) for file in (rows_file, path / "shared.safetensors")}
    meta = json.loads((path / "run.json").read_text())
    for file, tensors in kept.items():
        names = [key for key in tensors if key.partition("/")[0] not in "12"]
        for key in np.random.default_rng(0).permutation(names)[:6].tolist():
            save_file({k: x for k, x in tensors.items() if k != key}, file)
            sign(path, meta)
            with pytest.raises(CheckpointError, match=file.name):
                fit(make_it(), tmp_path / "run", resume=True, **options)
        save_file(tensors, file)
    sign(path, meta)
    fit(make_it(), tmp_path / "run", resume=True, **options)
