"""Convert text to the token ids of Whisper's decoder, and token ids to text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError, DataError, needs
from exogym.files import regular_text
from exogym.models.pretrained import byte_tokenizer

SECONDS_PER_STAMP, STAMPS = 0.02, 1501  # <|0.00|> to <|30.00|>
MULTILINGUAL_SIZE = 51_865  # from so many rows of the embedding on Whisper knows languages


class Tokens:
    """Convert between text and token ids with Whisper's vocabulary, and make the decoder's prompt.

    The prompt begins with <|startoftranscript|>. A multilingual model's prompt then has the language and
    <|transcribe|>. Without timestamps the prompt ends with <|notimestamps|>. The labels of a text are the rest of the
    prompt after <|startoftranscript|>, then a space and the text, then <|endoftext|>. With timestamps the token
    <|0.00|> comes before the text. After the text comes the token of the clip's length, in steps of 0.02 s. The ids of
    timestamp tokens follow the id of <|notimestamps|>. A tokenizer may lack timestamp tokens, so its length does not
    give the size of the vocabulary.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        language: the language's code, such as "de". A model with fewer than 51,865 tokens knows only English.
        timestamps: whether labels and transcripts have times.

    Raises:
        ArgumentError: the model does not know the language, or the tokenizer is not Whisper's.

    >>> from exogym.home.whisper.tokens import byte_tokens
    >>> tokens = Tokens(byte_tokens().tokenizer)
    >>> tokens.decode(tokens.encode("how now"))
    'how now'
    """

    def __init__(self, tokenizer: Any, *, language: str = "en", timestamps: bool = False):
        self.tokenizer, self.timestamps, self.language = tokenizer, timestamps, language
        self.end, self.start = self._id("<|endoftext|>"), self._id("<|startoftranscript|>")
        self.no_times = self._id("<|notimestamps|>")
        self.first_time = self.no_times + 1
        self.multilingual = self.size >= MULTILINGUAL_SIZE
        if not self.multilingual and language != "en":
            raise ArgumentError(
                f"language={language!r}: an English-only model can only transcribe English: use a multilingual model "
                "(without .en in its name)"
            )
        self.prompt = [self.start]
        if self.multilingual:
            self.prompt += [self._id(f"<|{language}|>"), self._id("<|transcribe|>")]
        if not timestamps:
            self.prompt.append(self.no_times)

    @property
    def size(self) -> int:
        """The number of token ids, including times. An embedding needs at least this number of rows."""
        return self.first_time + STAMPS

    def _id(self, name: str) -> int:
        found = self.tokenizer.token_to_id(name)
        if found is not None:
            return int(found)
        known = sorted(t[2:-2] for t in self.tokenizer.get_vocab() if re.fullmatch(r"<\|[a-z]{2,3}\|>", t))
        if known and name == f"<|{self.language}|>":
            raise ArgumentError(
                f"language={self.language!r} is not a language of the model: pass one of {', '.join(known)}"
            )
        raise ArgumentError(f"the tokenizer has no {name}, so it is not Whisper's: pass the model's own tokenizer")

    def encode(self, text: str, seconds: float | None = None) -> list[int]:
        """Return the labels of a text. With timestamps, `seconds` must be the length of the text's clip."""
        ids = self.tokenizer.encode(" " + text.strip(), add_special_tokens=False).ids
        if any(i >= self.end for i in ids):  # "<|endoftext|>" in a transcript must not end it
            ids = self.tokenizer.encode(" " + text.replace("<|", "").strip(), add_special_tokens=False).ids
        if self.timestamps:
            if seconds is None:
                raise ArgumentError("timestamps=True needs the length of the clip: pass seconds=")
            ids = [self.first_time, *ids, self.first_time + min(STAMPS - 1, round(seconds / SECONDS_PER_STAMP))]
        return [*self.prompt[1:], *ids, self.end]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the token ids, without times and special tokens."""
        return self.tokenizer.decode([i for i in ids if 0 <= i < self.end]).strip()


def file_tokens(path: Path, **options: Any) -> Tokens:
    """Return the `Tokens` of the file tokenizer.json at `path`. `options` are the options of `Tokens`.

    Raises:
        DataError: the file cannot be read.
    """
    tokenizers = needs("tokenizers", "whisper")
    try:
        return Tokens(tokenizers.Tokenizer.from_str(regular_text(path)), **options)
    except ArgumentError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer ({error}): pass a folder with Whisper's tokenizer.json") from error


def byte_tokens(**options: Any) -> Tokens:
    """Return a vocabulary of the 256 bytes, for small models with random weights. Its only language is English."""
    tokenizer = byte_tokenizer(["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"], "whisper")
    return Tokens(tokenizer, **options)


def plain(text: str) -> str:
    """Return a text for comparing words: lowercase letters, digits and apostrophes, with one space between words.

    >>> plain("Ask not, what YOUR country\\u2019s for --")
    "ask not what your country's for"
    """
    text = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'")
    kept = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return " ".join(word for word in kept.split() if word.strip("'"))
