"""Tasks with pretrained weights: fine-tuning Whisper and language models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from exogym.errors import ArgumentError, check_count, checked
from exogym.progress import notice
from exogym.study.tasks import Data, Task


@checked
def whisper_task(
    data: Any = None,
    *,
    weights: Data = None,
    window_s: float | None = None,
    lora_rank: int | None = 8,
    word_errors: bool = True,
    gradient_checkpointing: bool = False,
    language: str = "en",
    timestamps: bool = False,
    lines: int = 96,
    held_out: int = 24,
    val_clips: int = 32,
) -> Task:
    """Fine-tune Whisper with LoRA on your recordings, or on lines of Shakespeare that espeak-ng reads aloud.

    `data` and `window_s` are as in `exogym.home.speech.speech`. `weights` and the other options are as in
    `exogym.home.whisper.WhisperModelWrapper`. `lines` and `held_out` are the numbers of lines for espeak-ng to read:
    for training and for evaluation. An evaluation transcribes at most `val_clips` held-out clips, spread evenly,
    because this takes longer than training.
    """
    from exogym.home.speech import find_speech
    from exogym.home.whisper import WhisperModelWrapper, load_tokens
    from exogym.home.whisper.weights import find_weights

    check_count("val_clips", val_clips)
    found, spoken = find_weights(weights), {"language": language, "timestamps": timestamps}
    encode = load_tokens(found, **spoken).encode
    source = find_speech(data, encode, window_s=window_s, lines=lines, held_out=held_out)
    val, part = _thinned(source.val, "val_clips", val_clips)
    build = functools.partial(
        WhisperModelWrapper.from_weights, found, window_s=source.window_s, lora_rank=lora_rank,
        word_errors=word_errors, gradient_checkpointing=gradient_checkpointing, **spoken,
    )  # fmt: skip
    said = f"Whisper on {len(source.train)} clips of up to {source.window_s:g} s"
    return _fine_tuning("whisper", said, source, val, build, lora_rank, lr_of_all=1e-5, evaluates=part)


@checked
def language_task(
    data: Data = None,
    *,
    weights: Data = None,
    block_size: int = 128,
    lora_rank: int | None = 8,
    gradient_checkpointing: bool = False,
    val_blocks: int = 32,
) -> Task:
    """Fine-tune a causal language model with LoRA on a folder of your texts, or on Shakespeare's plays.

    `data` and `block_size` are as in `exogym.data.text.texts`. `weights`, a folder or a GGUF file, is as in
    `exogym.home.language.load_pretrained`. `lora_rank` and `gradient_checkpointing` are as in
    `exogym.home.language.LanguageModelWrapper`. An evaluation uses at most `val_blocks` held-out blocks, spread
    evenly.
    """
    from exogym.data.text import find_texts
    from exogym.home.language import LanguageModelWrapper, load_vocabulary
    from exogym.home.language.weights import find_weights

    check_count("block_size", block_size)
    check_count("val_blocks", val_blocks)
    found = find_weights(weights)
    words = load_vocabulary(found)
    if words.context is not None and block_size > words.context:
        raise ArgumentError(
            f"block_size={block_size} is longer than the model's context of {words.context} tokens: pass at most "
            f"{words.context}"
        )
    source = find_texts(data, words.encode, end=words.end, block_size=block_size)
    val, part = _thinned(source.val, "val_blocks", val_blocks)
    build = functools.partial(
        LanguageModelWrapper.from_weights, found, lora_rank=lora_rank, gradient_checkpointing=gradient_checkpointing
    )
    said = f"a language model on {len(source.train):,} blocks of {block_size} tokens, held out {source.held_out}"
    return _fine_tuning(
        "language", said, source, val, build, lora_rank, lr_of_all=3e-5, evaluates=part, perplexity=True
    )


def _fine_tuning(
    name: str, description: str, source: Any, val: Any, build: Callable[[], nn.Module], lora_rank: int | None,
    lr_of_all: float, **settings: Any,
) -> Task:  # fmt: skip
    """Return a task with pretrained weights. `lr_of_all` is the learning rate if all parameters are trained."""
    trained = "all of it" if lora_rank is None else f"LoRA of rank {lora_rank}"
    return Task(
        name,
        f"{description}, {trained}",
        source.origin,
        source.train,
        val,
        build,
        num_nodes=2,
        batch_size=2,
        max_steps=40,
        lr=1e-3 if lora_rank is not None else lr_of_all,
        H=8,
        outer_lr=1.0,
        outer_momentum=0.0,  # plain averages: a few rounds are too few for momentum
        lr_scheduler="cosine",
        warmup_steps=4,
        max_norm=1.0,
        **settings,
    )


def _thinned(val: Any, option: str, most: int) -> tuple[Any, str | None]:
    """Return at most `most` held-out examples, and a text that says which part they are, or None if they are all."""
    thinned, what = val.thinned(most), option.removeprefix("val_")
    if len(thinned) == len(val):
        return thinned, None
    part = f"{len(thinned)} of the {len(val)} held-out {what}"
    notice(f"each evaluation uses {part}, spread evenly; to use all of them, pass {option}={len(val)}")
    return thinned, part
