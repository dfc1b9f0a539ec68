"""Muon for a model's hidden matrices, AdamW for the rest.

Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024, with the learning rate of Liu et al., Muon
is scalable for LLM training, arXiv:2502.16982. A hidden matrix W (m, n) has the gradient G; mu is the momentum, gamma
the learning rate and lambda the weight decay:

    B <- mu B + (1 - mu) G                              # Nesterov: the next line takes (1 - mu) G + mu B instead of B
    O <- five steps of Newton and Schulz from B / |B|   # about U V^T of the singular value decomposition U S V^T
    W <- W (1 - gamma lambda) - gamma 0.2 sqrt(max(m, n)) O

The factor 0.2 sqrt(max(m, n)) scales O to the size of an AdamW update, so both optimizers can share a learning rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from exogym.core.base.torch_private import bare_step, can_fuse


class HiddenAdamW(Optimizer, ABC):
    """An optimizer with its own rule for the hidden matrices and AdamW for all other parameters.

    `OptimSpec` sets the option `flag` to True in the groups of hidden matrices. AdamW trains the other groups.
    """

    flag: ClassVar[str]

    @abstractmethod
    def _of_hidden(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return the torch optimizer for the hidden matrices in `groups`."""

    @property
    def parts(self) -> list[Optimizer]:
        """The torch optimizers that take the steps, each with its share of this optimizer's groups."""
        if "_parts" not in self.__dict__:
            self._parts: list[Optimizer] = []
            self._are_hidden: list[bool] = []
            for hidden in (True, False):
                groups = self._groups(hidden)
                if not groups:
                    continue
                fused = True if can_fuse(p for group in groups for p in group["params"]) else None
                self._parts.append(self._of_hidden(groups) if hidden else torch.optim.AdamW(groups, fused=fused))
                self._are_hidden.append(hidden)
            self._steps = [bare_step(part) for part in self._parts]
        return self._parts

    def _groups(self, hidden: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group[self.flag] is hidden]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step both optimizers along `.grad`, which a given `closure` first computes together with the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, hidden, step in zip(self.parts, self._are_hidden, self._steps, strict=True):
            part.state = self.state  # may belong to another row
            part.param_groups = self._groups(hidden)
            step()
        return loss


class MuonAdamW(HiddenAdamW):
    """Muon for the parameter groups with `use_muon`, AdamW for all others (`inner_optim="muon"`).

    Under the name "muon", Muon trains a model's hidden matrices: parameters with two dimensions, both over 1, except
    embeddings (such as a tied head) and the head (`fleet.layout.hidden_matrices`). AdamW trains everything else:
    embeddings, head, norms, biases, and parameters of more dimensions, such as convolutions. To change this choice,
    pass groups: `OptimSpec("muon", groups=[("*.gate.weight", {"use_muon": False})])`.

    Args:
        params: parameters, or groups with their own `use_muon` and values of the arguments below.
        lr, weight_decay: learning rate and decoupled weight decay of Muon and AdamW.
        momentum, nesterov, ns_steps: arguments of `torch.optim.Muon`.
        adjust_lr_fn: how `torch.optim.Muon` scales the update of a matrix (m, n): "match_rms_adamw" to the size of
            AdamW's updates, or "original" by sqrt(max(1, m / n)), for learning rates near 0.02.
        betas, eps: arguments of AdamW.

    State: Muon's and AdamW's state, per parameter.

    >>> p = torch.nn.Parameter(torch.eye(2))
    >>> MuonAdamW([{"params": [p], "use_muon": True}], lr=0.1).param_groups[0]["momentum"]
    0.95
    """

    flag = "use_muon"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        shared = {"lr": lr, "weight_decay": weight_decay, "use_muon": False}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        adamw = {"betas": betas, "eps": eps}
        super().__init__(params, shared)
        for group in self.param_groups:
            for name, value in (muon if group["use_muon"] else adamw).items():
                group.setdefault(name, value)
        self.defaults |= muon | adamw
        _ = self.parts  # the optimizers check their arguments

    def _of_hidden(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.Muon(groups)
