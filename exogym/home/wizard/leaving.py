"""Tell the user how to use a trained model, and save a speech or language model for the library transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exogym.home.tasks import language_task, whisper_task

MODEL, ADAPTER = "model", "adapter"  # subfolders of the run's folder
TOKENS = ("language", "timestamps")


def hand_over(task: str, data: str | None, options: Mapping[str, Any], file: Path) -> list[str]:
    """Return lines of text that tell the user how to use a trained model.

    A model of the task "whisper" is also saved for the library transformers, in a folder beside `file`. The adapters of
    this copy are merged, and its window is the whole 30 s.

    A model of the task "language" is saved like this, too, and its adapters also alone.

    Args:
        task, data, options: the task, its data and its options, as in the run's profile.
        file: the run's model file.

    Raises:
        ExoGymError: the folder cannot be written.

    >>> for line in hand_over("digits", None, {"hidden": 8}, Path("runs/one/fit_1.model.safetensors")):
    ...     print(line)
    to use it in Python:
        from exogym import load_model
        from exogym.tasks import load_task
        model = load_model(load_task('digits', hidden=8).make_model(), 'runs/one/fit_1.model.safetensors')
    """
    if task == "whisper":
        return _speech(options, file)
    if task == "language":
        return _language(options, file)
    given = ", ".join([repr(task), *([repr(data)] if data else []), *(f"{key}={options[key]!r}" for key in options)])
    return [
        "to use it in Python:", "    from exogym import load_model", "    from exogym.tasks import load_task",
        f"    model = load_model(load_task({given}).make_model(), {str(file)!r})",
    ]  # fmt: skip


def _speech(options: Mapping[str, Any], file: Path) -> list[str]:
    from exogym.home.whisper import WhisperModelWrapper

    known = {name: of.default for name, of in inspect.signature(whisper_task).parameters.items()} | dict(options)
    weights, tokens = known["weights"], {name: known[name] for name in TOKENS}
    trained = WhisperModelWrapper.from_trained(file, weights, **tokens)
    folder = file.parent / MODEL
    trained.save_pretrained(folder)
    return [
        f"model for transformers, with merged adapters: {folder}", "to use it in Python:",
        "    import transformers, exogym.home.speech",
        f"    hear = transformers.pipeline('automatic-speech-recognition', {str(folder)!r})",
        "    print(hear(exogym.home.speech.read_audio('recording.wav')[0])['text'])",
    ]  # fmt: skip


def _language(options: Mapping[str, Any], file: Path) -> list[str]:
    from exogym.home.language import LanguageModelWrapper

    known = {name: of.default for name, of in inspect.signature(language_task).parameters.items()} | dict(options)
    model = LanguageModelWrapper.from_trained(file, known["weights"])
    folder = file.parent / MODEL
    model.save_pretrained(folder)
    lines = [f"model for transformers, with merged adapters: {folder}"]
    if known["lora_rank"] is not None:
        model.save_adapter(file.parent / ADAPTER)
        lines.append(f"adapter alone, for peft: {file.parent / ADAPTER}")
    return [
        *lines, "to use it in Python:", "    import transformers",
        f"    write = transformers.pipeline('text-generation', {str(folder)!r})",
        "    print(write('Once', max_new_tokens=40)[0]['generated_text'])",
    ]  # fmt: skip
