"""Write a folder with which transformers can use a model: weights, sizes, vocabulary, and settings for transcribing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from exogym.errors import needs
from exogym.home.whisper.tokens import TASKS, Tokens

OWN = ("_from_model_config", "transformers_version", "return_timestamps")  # of transformers, not to be handed on


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
        known["task_to_id"] = {name: pieces[f"<|{name}|>"] for name in TASKS}
        known |= {"language": tokens.language, "task": tokens.task}
    model.generation_config = needs("transformers", "whisper").GenerationConfig(**known)
    model.save_pretrained(folder)
    whisper.WhisperTokenizer(tokenizer_object=tokens.tokenizer).save_pretrained(folder)
    whisper.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins).save_pretrained(folder)
