"""Causal language models, for fine-tuning like any other model. This module needs the extra `language`.

A small random model with a vocabulary of bytes learns nothing here, but runs everywhere:

>>> import torch
>>> loaded: Pretrained = load_pretrained("small-random")
>>> model = LanguageModelWrapper(loaded.model, loaded.tokenizer, lora_rank=2)
>>> ids = torch.tensor([loaded.tokenizer.encode("To be, or not to be", add_special_tokens=False)])
>>> loss = model((ids[:, :-1], ids[:, 1:]))["loss"]
>>> words: Vocabulary = load_vocabulary("small-random")
>>> loss.shape, words.context
(torch.Size([]), 256)
>>> len(model.write(["To be"], tokens=4))
1
"""

from exogym.home.language.weights import Pretrained, Vocabulary, load_pretrained, load_vocabulary
from exogym.home.language.wrapper import LanguageModelWrapper

__all__ = ["LanguageModelWrapper", "Pretrained", "Vocabulary", "load_pretrained", "load_vocabulary"]
