"""Whisper, the speech recognition model, for fine-tuning like any other model. This module needs the extra `whisper`.

transformers is imported only when a model is made.
"""

from exogym.home.whisper.decoding import WordErrors
from exogym.home.whisper.tokens import Tokens, plain
from exogym.home.whisper.weights import Pretrained, load_pretrained, load_tokens
from exogym.home.whisper.wrapper import WhisperModelWrapper

__all__ = ["Pretrained", "Tokens", "WhisperModelWrapper", "WordErrors", "load_pretrained", "load_tokens", "plain"]
