"""Whisper, the speech recognition model, for fine-tuning like any other model. This module needs the extra `whisper`.

transformers is imported only when a model is made. A small random model learns nothing here, but runs everywhere:

>>> loaded: Pretrained = load_pretrained("small-random")
>>> model = WhisperModelWrapper(loaded.model, load_tokens("small-random"), window_s=5.0, lora_rank=4)
>>> any(parameter.requires_grad for parameter in model.parameters())
True
"""

from exogym.home.whisper.decoding import WordErrors
from exogym.home.whisper.tokens import Tokens, plain
from exogym.home.whisper.weights import Pretrained, load_pretrained, load_tokens
from exogym.home.whisper.wrapper import WhisperModelWrapper

__all__ = ["Pretrained", "Tokens", "WhisperModelWrapper", "WordErrors", "load_pretrained", "load_tokens", "plain"]
