"""Transcribe speech token by token, and count wrong words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.errors import DataError, needs
from exogym.home.whisper.tokens import Tokens, plain


@torch.no_grad()
def greedy(
    model: Any, features: Tensor, tokens: Tokens, suppressed: Sequence[int], suppressed_first: Sequence[int], most: int
) -> list[list[int]]:
    """Return the token ids of each clip's transcript, without the prompt and the end token.

    At each position the model's likeliest token is chosen.

    Args:
        model: a `WhisperForConditionalGeneration`.
        features: log-mel features of the clips, (batch, n_mels, frames).
        tokens: the model's vocabulary.
        suppressed: token ids that are never chosen.
        suppressed_first: token ids that are never chosen as the first token.
        most: the most tokens of a transcript.
    """
    encoded = model.get_encoder()(features)
    told = torch.tensor(tokens.prompt, device=features.device).expand(len(features), -1)
    written = torch.empty(len(features), 0, dtype=torch.long, device=features.device)
    never = torch.tensor(sorted({*suppressed, tokens.start, tokens.no_times}), device=features.device)
    first = torch.tensor(sorted({*suppressed_first, tokens.end}), device=features.device)
    ended = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    kept = None
    while written.shape[1] < most and not ended.all():
        given = told if kept is None else written[:, -1:]
        out = model(encoder_outputs=encoded, decoder_input_ids=given, past_key_values=kept, use_cache=True)
        kept, scores = out.past_key_values, out.logits[:, -1].float()
        scores[:, never] = -torch.inf
        if not tokens.timestamps:
            scores[:, tokens.first_time :] = -torch.inf
        if not written.shape[1]:
            scores[:, first] = -torch.inf
        chosen = torch.where(ended, tokens.end, scores.argmax(-1))
        written, ended = torch.cat([written, chosen[:, None]], dim=1), ended | (chosen == tokens.end)
    return [row[: row.index(tokens.end)] if tokens.end in row else row for row in written.tolist()]


def unlooped(ids: list[int], most: int) -> list[int]:
    """Remove repetitions at the end of a transcript, which a model can write without end.

    The repetitions are removed only if the transcript has `most` tokens and repeats its last tokens three times or
    more. One copy of these tokens remains.

    >>> unlooped([1, 2, 3, 2, 3, 2, 3], most=7), unlooped([1, 1, 1], most=7)
    ([1, 2, 3], [1, 1, 1])
    """
    if len(ids) < most:
        return ids
    for size in range(1, len(ids) // 3 + 1):
        piece, count = ids[-size:], 1
        while ids[-size * (count + 1) : -size * count] == piece:
            count += 1
        if count >= 3:
            return ids[: len(ids) - size * (count - 1)]
    return ids


@dataclass(frozen=True)
class WordErrors:
    """Count the word errors of transcripts, compared with the correct texts.

    Before comparing, `plain` removes case and punctuation.

    Attributes:
        words: number of words in the correct texts.
        replaced: words that the transcripts replace by another word (substitutions).
        left_out: words that the transcripts lack (deletions).
        put_in: words that only the transcripts have (insertions).

    >>> WordErrors.of(["Ask not what your country can do"], ["ask what your Country, can do do"]).rate
    0.2857142857142857
    """

    words: int
    replaced: int
    left_out: int
    put_in: int

    @classmethod
    def of(cls, texts: Sequence[str], heard: Sequence[str]) -> WordErrors:
        """Compare each correct text with its transcript in `heard`, and return the errors of all pairs together.

        Raises:
            DataError: the numbers of texts and transcripts differ, or no text has a word.
        """
        if len(texts) != len(heard):
            raise DataError(f"{len(texts)} texts and {len(heard)} transcripts: pass one transcript per text")
        pairs = [(plain(text), plain(said)) for text, said in zip(texts, heard, strict=True)]
        pairs = [(text, said) for text, said in pairs if text]
        if not pairs:
            raise DataError("the texts have no words, so the word error rate is undefined: pass texts with words")
        found = needs("jiwer", "whisper").process_words([text for text, _ in pairs], [said for _, said in pairs])
        return cls(
            found.hits + found.substitutions + found.deletions, found.substitutions, found.deletions, found.insertions
        )

    @property
    def rate(self) -> float:
        """The word error rate: all errors divided by `words`. With many insertions it can be over 1."""
        return (self.replaced + self.left_out + self.put_in) / self.words
