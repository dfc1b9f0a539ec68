"""A causal language model that ExoGym can train: it takes blocks of tokens, and returns a loss."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from exogym.core.base.modes import evaluation_mode
from exogym.errors import ArgumentError, DataError, check_count, check_number, checked, needs
from exogym.home.language.weights import EXTRA, Pretrained, context_of, load_pretrained
from exogym.models.pretrained import Weights, checkpointed, fill, merged, rank_of, read_trained, with_adapters
from exogym.streams import generator

AT_ONCE = 512  # tokens, where no gradient is wanted: the scores of one are 50,000 numbers
OUTSIDE = "base_model.model."  # peft's name of the model around the model


class LanguageModelWrapper(nn.Module):
    """Wrap a causal language model for training on batches (x, y) of token ids, where y is x shifted by one token.

    The loss is the mean over tokens of -log p(y_t | x_1 ... x_t), in nats. Its exponential is the perplexity. Tokens y
    of -100 do not count. Without gradients (evaluation) the result also has `accuracy`, the share of tokens that are
    the model's likeliest token.

    Args:
        language_model: an `AutoModelForCausalLM` of transformers. It becomes part of this module.
        tokenizer: the model's tokenizer of transformers.
        lora_rank: train adapters of this rank beside each matrix of a layer (Hu et al. 2021). The model itself is
            frozen, and all nodes share one copy of it. Without `lora_rank`, the whole model is trained.
        gradient_checkpointing: compute the layers twice instead of storing their outputs. This takes less memory and
            gives the same bits.

    Raises:
        ArgumentError: the tokenizer does not fit the model, or the rank is impossible.
    """

    evaluates_in_parts = True  # forward limits what it computes at once where no gradient is wanted

    @checked
    def __init__(
        self,
        language_model: nn.Module,
        tokenizer: Any,
        *,
        lora_rank: int | None = None,
        gradient_checkpointing: bool = False,
    ):
        super().__init__()
        given: Any = language_model
        if not hasattr(given, "get_input_embeddings") or not callable(getattr(tokenizer, "encode", None)):
            raise ArgumentError(
                "language_model and tokenizer must be a causal language model of transformers and its tokenizer, not "
                f"{type(given).__name__} and {type(tokenizer).__name__}"
            )
        rows = given.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > rows:
            raise ArgumentError(
                f"the tokenizer belongs to a larger model: it has {len(tokenizer)} tokens, but the embedding has "
                f"{rows} rows: pass the model's own tokenizer"
            )
        self.tokenizer, self.context = tokenizer, context_of(given.config)
        is_evaluating = not any(module.training for module in given.modules())  # as transformers loads models
        if gradient_checkpointing:
            checkpointed(given)
        if lora_rank is not None:
            given = with_adapters(given, lora_rank, "all-linear", EXTRA, **_transposed(given))
        self.language_model: Any = given
        if is_evaluating:
            self.eval()

    @classmethod
    def from_weights(cls, weights: Weights = None, **options: Any) -> LanguageModelWrapper:
        """Return a wrapper of the model that `load_pretrained(weights)` returns, with the class's `options`."""
        found: Pretrained = load_pretrained(weights)
        return cls(found.model, found.tokenizer, **options)

    @classmethod
    def from_trained(cls, file: str | os.PathLike[str], weights: Weights = None) -> LanguageModelWrapper:
        """Return the model in a safetensors file that a run saved, such as `fit_1.model.safetensors`.

        The rank of the adapters is read from the file.

        Args:
            weights: the weights with which the run started, as for `load_pretrained`.

        Raises:
            DataError: the file cannot be read, or its model did not start from these weights.
        """
        state = read_trained(file)
        made = cls.from_weights(weights, lora_rank=rank_of(state))
        fill(made, state, f"{os.fspath(file)!r} has no language model that started from weights={weights!r}")
        return made

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return {"loss": ...}, and without gradients also "accuracy".

        Args:
            batch: (x, y), each (batch, length) int64, not longer than the model's context.
        """
        x, y = batch
        if torch.is_grad_enabled():
            loss, count, _ = self._sums(x, y)
            return {"loss": loss / count}
        rows = max(1, AT_ONCE // x.shape[1])
        parts = [
            torch.stack(self._sums(some, theirs)) for some, theirs in zip(x.split(rows), y.split(rows), strict=True)
        ]
        loss, count, right = torch.stack(parts).sum(0)
        return {"loss": loss / count, "accuracy": right / count}

    def _sums(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of the tokens' losses, the number of tokens, and the number of tokens predicted correctly."""
        if self.context is not None and x.shape[1] > self.context:
            raise DataError(
                f"blocks of {x.shape[1]} tokens are longer than the model's context of {self.context}: pass a smaller "
                "block_size"
            )
        scores, wanted = self.language_model(input_ids=x, use_cache=False).logits.flatten(0, 1), y.flatten()
        loss = F.cross_entropy(scores.float(), wanted, reduction="sum")
        return loss, (wanted != -100).sum(), (scores.detach().argmax(-1) == wanted).sum()

    @torch.no_grad()
    def perplexity_on(self, blocks: tuple[Tensor, Tensor]) -> float:
        """Return exp(mean loss) on the blocks (x, y), as `take` of a data set returns them."""
        place = next(self.parameters()).device
        with evaluation_mode(self):
            return math.exp(float(self((blocks[0].to(place), blocks[1].to(place)))["loss"]))

    @torch.no_grad()
    def write(
        self, prompts: Sequence[str], *, tokens: int = 48, temperature: float = 0.8, top: int = 50, seed: int = 0
    ) -> list[str]:
        """Continue each text, and return only the continuations.

        Each token is drawn from the `top` likeliest tokens, with p ~ exp(score / temperature). A text ends after
        `tokens` tokens, at the model's end token, or where the model's context is full.

        Args:
            temperature: smaller values make likelier tokens more frequent; 0 always takes the likeliest token.
            seed: the same seed gives the same texts.

        Raises:
            ArgumentError: a number is out of range.
            DataError: a prompt has no token.
        """
        check_count("tokens", tokens)
        check_count("top", top)
        check_number("temperature", temperature, least=0)
        with evaluation_mode(self):
            return [self._written(prompt, tokens, temperature, top, seed + i) for i, prompt in enumerate(prompts)]

    def _written(self, prompt: str, tokens: int, temperature: float, top: int, seed: int) -> str:
        place = next(self.parameters()).device
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no tokens: pass at least one word")
        random = generator(seed, "written")
        given, kept, out = torch.tensor([ids], device=place), None, list[int]()
        while len(out) < tokens and (self.context is None or len(ids) + len(out) < self.context):
            found = self.language_model(input_ids=given, past_key_values=kept, use_cache=True)
            kept, scores = found.past_key_values, found.logits[0, -1].float().cpu()
            best, which = scores.topk(min(top, len(scores)))
            drawn = torch.zeros(1, dtype=torch.long)
            if temperature > 0:
                drawn = torch.multinomial((best / temperature).softmax(0), 1, generator=random)
            chosen = int(which[drawn])
            if chosen == self.tokenizer.eos_token_id:
                break
            out.append(chosen)
            given = torch.tensor([[chosen]], device=place)
        return str(self.tokenizer.decode(ids + out, skip_special_tokens=True)).removeprefix(
            str(self.tokenizer.decode(ids, skip_special_tokens=True))
        )

    def exported(self) -> nn.Module:
        """Return a copy as a plain transformers model, with adapters added to the matrices."""
        return merged(self.language_model)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the `exported` model and its tokenizer into a folder.

        `load_pretrained(folder)` and transformers' `AutoModelForCausalLM.from_pretrained(folder)` open the folder.
        """
        self.exported().save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)

    def save_adapter(self, folder: str | os.PathLike[str]) -> None:
        """Write only the adapters into a folder, for `peft.PeftModel.from_pretrained(model, folder)`.

        `model` is the model before training, as transformers loads it.

        Raises:
            ArgumentError: this model has no adapters.
        """
        peft, known = needs("peft", EXTRA), getattr(self.language_model, "peft_config", None)
        if not known:
            raise ArgumentError("the model has no adapter: save_pretrained() writes the whole model")
        config = copy.copy(known["default"])
        config.task_type, config.inference_mode = "CAUSAL_LM", True
        config.save_pretrained(folder)
        state = peft.get_peft_model_state_dict(self.language_model)
        named = {OUTSIDE + name: x.detach().cpu().contiguous() for name, x in state.items()}
        save_file(named, os.path.join(folder, "adapter_model.safetensors"), {"format": "pt"})


def _transposed(model: Any) -> dict[str, bool]:
    """Return peft's option for models such as GPT-2, whose matrices are stored transposed."""
    kind = needs("transformers.pytorch_utils", EXTRA).Conv1D
    return {"fan_in_fan_out": True} if any(isinstance(module, kind) for module in model.modules()) else {}
