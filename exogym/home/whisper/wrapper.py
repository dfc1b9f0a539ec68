"""Whisper as a model that ExoGym can train: it takes a batch of sound and labels, and returns a loss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exogym.core.base.modes import evaluation_mode
from exogym.errors import ArgumentError, DataError, checked
from exogym.home.whisper.decoding import WordErrors, greedy, unlooped
from exogym.home.whisper.features import FRAMES_PER_SECOND, POSITIONS_PER_SECOND, SAMPLE_RATE, LogMel
from exogym.home.whisper.tokens import Tokens
from exogym.home.whisper.weights import Pretrained, load_pretrained, of_transformers, write_folder
from exogym.models.pretrained import checkpointed, fill, merged, rank_of, read_trained, with_adapters

NO_LABEL = -100
POSITIONS = "model.encoder.embed_positions.weight"
AT_ONCE = 8  # clips, where no gradient is wanted: the scores of one are 50,000 numbers a token
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
TOKENS_PER_SECOND, TOKENS_AT_LEAST = 8, 24  # what is written of a clip at most; a model that repeats itself ends there


class WhisperModelWrapper(nn.Module):
    """Wrap Whisper (Radford et al. 2022) for training on batches (audio, labels).

    The loss is the mean over labels of -log p(label | audio, labels before it). The decoder's input is
    <|startoftranscript|> and then the labels, without the last label. Labels of -100 are padding. Without gradients
    (evaluation) the result also has `accuracy`, the share of labels that are the model's likeliest token.

    Args:
        whisper_model: a `WhisperForConditionalGeneration` of transformers. It becomes part of this module.
        processor: the model's `WhisperProcessor` or tokenizer.
        device: the module's device. By default the trainer chooses the device.
        window_s: seconds of sound that the encoder gets. Whisper was trained with 30 s. A shorter window takes less
            time: the encoder keeps only its first positions, 50 per second of the window. Clips must not be longer than
            the window. `exported` restores all positions.
        lora_rank: train adapters of this rank beside each matrix of a layer (Hu et al. 2021). The model itself is
            frozen, and all nodes share one copy of it. Without `lora_rank`, the whole model is trained.
        gradient_checkpointing: compute the layers twice instead of storing their outputs. This takes less memory and
            gives the same bits.
        word_errors: also transcribe the clips of an evaluation, and return their word error rate as `wer`.
        language, timestamps: options of `Tokens`.

    Raises:
        ArgumentError: the processor or the language does not fit the model, or a size is out of range.
    """

    evaluates_in_parts = True  # forward limits what it computes at once where no gradient is wanted

    @checked
    def __init__(
        self,
        whisper_model: nn.Module,
        processor: Any,
        device: str | torch.device | None = None,
        *,
        window_s: float = 30.0,
        lora_rank: int | None = None,
        gradient_checkpointing: bool = False,
        word_errors: bool = False,
        language: str = "en",
        timestamps: bool = False,
    ):
        super().__init__()
        known = isinstance(processor, Pretrained)
        found = processor if known else of_transformers(
            whisper_model, processor, language=language, timestamps=timestamps
        )  # fmt: skip
        self.tokens: Tokens = found.tokens
        self._suppressed = found.suppressed, found.suppressed_first
        config: Any = whisper_model.config
        if self.tokens.size > config.vocab_size:
            raise ArgumentError(
                f"the tokenizer belongs to a larger model: it needs {self.tokens.size} rows, but the embedding has "
                f"{config.vocab_size}: pass the model's own tokenizer"
            )
        self.window_s, self.word_errors = window_s, word_errors
        is_evaluating = not any(module.training for module in whisper_model.modules())  # as transformers loads models
        self._positions = cut_window(whisper_model, window_s)
        self.log_mel = LogMel(config.num_mel_bins)
        if gradient_checkpointing:
            checkpointed(whisper_model)
        if lora_rank is not None:
            whisper_model = with_adapters(whisper_model, lora_rank, LORA_TARGETS, "whisper")
        self.whisper_model: Any = whisper_model
        if is_evaluating:
            self.eval()
        if device is not None:
            self.to(device)

    @classmethod
    def from_weights(cls, weights: str | os.PathLike[str] | None = None, **options: Any) -> WhisperModelWrapper:
        """Return a wrapper of the model that `load_pretrained(weights)` returns, with the class's `options`."""
        own = {name: options.pop(name) for name in ("language", "timestamps") if name in options}
        found = load_pretrained(weights, **own)
        return cls(found.model, found, **options)

    @classmethod
    def from_trained(
        cls, file: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None, **options: Any
    ) -> WhisperModelWrapper:
        """Return the model in a safetensors file that a run saved, such as `fit_1.model.safetensors`.

        The window and the rank of the adapters are read from the file.

        Args:
            weights: the weights with which the run started, as for `load_pretrained`.
            options: the class's options except `window_s` and `lora_rank`.

        Raises:
            DataError: the file cannot be read, or its model did not start from these weights.
        """
        state = read_trained(file)
        positions = next((len(x) for name, x in state.items() if name.endswith(POSITIONS)), 0)
        made = cls.from_weights(
            weights, window_s=positions / POSITIONS_PER_SECOND, lora_rank=rank_of(state), **options
        ) if positions else None  # fmt: skip
        fill(made, state, f"{os.fspath(file)!r} has no Whisper model that started from weights={weights!r}", POSITIONS)
        assert made is not None
        return made

    @property
    def samples(self) -> int:
        """The number of samples in the encoder's window, at 16 kHz."""
        return round(self.window_s * SAMPLE_RATE)

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return {"loss": ...}. Without gradients add "accuracy"; with word_errors in evaluation mode also add "wer".

        Args:
            batch: (audio, labels). `audio` is sound (batch, samples) at 16 kHz or log-mel features (batch, n_mels,
                frames), not longer than the window. `labels` is (batch, length) int64, padded with -100. Labels may
                begin with <|startoftranscript|>.
        """
        audio, labels = batch
        if not torch.is_grad_enabled():
            return self._evaluated(audio, labels)
        loss, count, _ = self._sums(self.features(audio), labels)
        return {"loss": loss / count}

    def features(self, audio: Tensor) -> Tensor:
        """Return log-mel features, padded to the length of the window.

        Args:
            audio: sound (batch, samples) at 16 kHz, or log-mel features (batch, n_mels, frames).

        Raises:
            DataError: the clips are longer than the window.
        """
        rate = FRAMES_PER_SECOND if audio.dim() == 3 else SAMPLE_RATE
        missing = round(self.window_s * rate) - audio.shape[-1]
        if missing < 0:
            raise DataError(
                f"clips of {audio.shape[-1] / rate:g} s are longer than the window of {self.window_s:g} s: "
                f"shorten the clips, or raise window_s (at most {len(self._positions) / 50:g} s)"
            )
        if audio.dim() == 2:
            return self.log_mel(F.pad(audio, (0, missing)))
        silence = audio.amin((1, 2), keepdim=True).expand(-1, audio.shape[1], missing)  # the floor of each clip
        return torch.cat([audio, silence], dim=-1)

    def _sums(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of the labels' losses, the number of labels, and the number of labels predicted correctly."""
        if bool((labels[:, 0] == self.tokens.start).all()):
            labels = labels[:, 1:]
        start = labels.new_full((len(labels), 1), self.tokens.start)
        seen = torch.cat([start, labels[:, :-1]], dim=1)
        seen = seen.masked_fill(seen == NO_LABEL, self.tokens.end)
        out = self.whisper_model(input_features=features, decoder_input_ids=seen, use_cache=False)
        scores, wanted = out.logits.flatten(0, 1), labels.flatten()
        loss = F.cross_entropy(scores, wanted, ignore_index=NO_LABEL, reduction="sum")
        return loss, (wanted != NO_LABEL).sum(), (scores.detach().argmax(-1) == wanted).sum()

    def _evaluated(self, audio: Tensor, labels: Tensor) -> dict[str, Tensor]:
        sums, heard = [], list[str]()
        for some, theirs in zip(audio.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
            features = self.features(some)
            sums.append(torch.stack(self._sums(features, theirs)))
            if self.word_errors and not self.training:
                heard += self._written(features)
        loss, count, right = torch.stack(sums).sum(0)
        found = {"loss": loss / count, "accuracy": right / count}
        if heard:
            texts = [self.tokens.decode(row) for row in labels.tolist()]
            found["wer"] = torch.tensor(WordErrors.of(texts, heard).rate)
        return found

    def _written(self, features: Tensor) -> list[str]:
        most = min(
            TOKENS_AT_LEAST + round(TOKENS_PER_SECOND * self.window_s),
            self.whisper_model.config.max_target_positions - len(self.tokens.prompt),
        )
        written = greedy(self.whisper_model, features, self.tokens, *self._suppressed, most)
        return [self.tokens.decode(unlooped(ids, most)) for ids in written]

    @torch.no_grad()
    def transcribe(self, clips: Sequence[Tensor | np.ndarray]) -> list[str]:
        """Return the transcript of each clip. A clip has samples (n,) at 16 kHz and is not longer than the window."""
        place = next(self.parameters()).device
        found: list[str] = []
        with evaluation_mode(self):
            for at in range(0, len(clips), AT_ONCE):
                some = [torch.as_tensor(clip, dtype=torch.float32) for clip in clips[at : at + AT_ONCE]]
                features = [self.features(clip[None].to(place)) for clip in some]
                found += self._written(torch.cat(features))
        return found

    def errors_on(self, clips: Sequence[Tensor | np.ndarray], texts: Sequence[str]) -> WordErrors:
        """Transcribe `clips`, and return the word errors, compared with the correct `texts`."""
        return WordErrors.of(texts, self.transcribe(clips))

    def exported(self) -> nn.Module:
        """Return a copy as a plain transformers model, with all positions, and with adapters added to the matrices."""
        model = merged(self.whisper_model)
        put_window(model, self._positions.to(model.device))
        return model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the `exported` model, its vocabulary and its settings into a folder.

        `load_pretrained(folder)` and `transformers.pipeline("automatic-speech-recognition", folder)` open the folder.
        The model in the folder takes 30 s of sound at once, even if the wrapper's window is shorter.
        """
        write_folder(self.exported(), self.tokens, *self._suppressed, folder)


def cut_window(model: Any, window_s: float) -> Tensor:
    """Shorten the encoder's window to `window_s` seconds, by keeping only its first position embeddings.

    These embeddings are fixed sines.

    Returns:
        All position embeddings from before, (1500, d), where d is the model's width.

    Raises:
        ArgumentError: the model has fewer positions, or the window is not a multiple of 0.02 s.
    """
    whole: Tensor = model.get_encoder().embed_positions.weight.detach()
    count = round(window_s * POSITIONS_PER_SECOND)
    if not 0 < count <= len(whole) or abs(count - window_s * POSITIONS_PER_SECOND) > 1e-6:
        raise ArgumentError(
            f"window_s={window_s!r} must be at most {len(whole) / POSITIONS_PER_SECOND:g} s for this model, and a "
            "multiple of 0.02 s"
        )
    if count < len(whole):
        put_window(model, whole[:count].clone())
    return whole


def put_window(model: Any, positions: Tensor) -> None:
    encoder = model.get_encoder()
    encoder.embed_positions = nn.Embedding.from_pretrained(positions, freeze=True)
    encoder.max_source_positions = model.config.max_source_positions = len(positions)
