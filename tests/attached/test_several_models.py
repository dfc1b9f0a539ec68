"""Several models with an attach call each, as in a GAN; and batches joined by the user's function."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from adapters import in_world
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as real_or_not
from torch.utils.data import TensorDataset

from exogym import attach
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy

STEPS = 6
DATA = TensorDataset(torch.randn(48, 2, generator=torch.Generator().manual_seed(1)))


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def losses(generator: nn.Module, discriminator: nn.Module, real: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return both losses, as functions of the same fake examples."""
    noise = torch.randn(len(real), 3, generator=torch.Generator().manual_seed(100 * step + rank))
    ones = torch.ones(len(real), 1)
    fake = generator(noise)
    of_d = real_or_not(discriminator(real), ones) + real_or_not(discriminator(fake.detach()), 0 * ones)
    return of_d, real_or_not(discriminator(fake), ones)


def attached(rank: int) -> list[float]:
    generator, discriminator = pair()
    nodes_g = attach(generator, torch.optim.SGD(generator.parameters(), 0.1), FedAvgStrategy(H=3, weighting="uniform"))
    nodes_d = attach(
        discriminator, torch.optim.SGD(discriminator.parameters(), 0.2), FedAvgStrategy(H=2, weighting="uniform")
    )
    for step, (real,) in enumerate(nodes_d.loader(DATA, 4, shuffle=False)):
        of_d, of_g = losses(generator, discriminator, real, step, rank)
        of_d.backward(inputs=list(discriminator.parameters()))
        of_g.backward(inputs=list(generator.parameters()))
        nodes_d.step()
        nodes_g.step()
    ends = [p.detach().flatten() for model in (nodes_g.finish(), nodes_d.finish()) for p in model.parameters()]
    found: list[float] = torch.cat(ends).tolist()
    return found


def by_hand() -> Tensor:
    nodes = [copy.deepcopy(pair()) for _ in range(2)]
    for step in range(STEPS):
        for rank, (generator, discriminator) in enumerate(nodes):
            real = DATA.tensors[0][rank::2][4 * step : 4 * step + 4]
            of_d, of_g = losses(generator, discriminator, real, step, rank)
            for loss, model, rate in ((of_d, discriminator, 0.2), (of_g, generator, 0.1)):
                grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.grad = -rate * g
            for p in (*generator.parameters(), *discriminator.parameters()):
                p.data += p.grad
        for which, H in ((0, 3), (1, 2)):
            for two in zip(*(node[which].parameters() for node in nodes), strict=True) if (step + 1) % H == 0 else ():
                mean = (two[0].data + two[1].data) / 2
                for p in two:
                    p.data.copy_(mean)
    return torch.cat([p.detach().flatten() for model in nodes[0] for p in model.parameters()])


def test_a_gan_trains_with_two_attach_calls(tmp_path: Path) -> None:
    """Each model has its own strategy, and they synchronize at different steps."""
    first, second = in_world(2, tmp_path, attached)
    assert first == second
    torch.testing.assert_close(torch.tensor(first), by_hand())


def test_the_users_function_joins_a_nodes_batches() -> None:
    texts = ["a", "bcd", "ef", "ghij"]
    nodes = attach(nn.Linear(1, 1), None, DiLoCoStrategy(H=2))
    padded = {"collate_fn": lambda rows: [row.ljust(4, ".") for row in rows]}
    batches = list(nodes.loader(texts, 2, shuffle=False, dataloader_kwargs=padded))
    assert batches == [["a...", "bcd."], ["ef..", "ghij"]]
    with pytest.raises(ArgumentError, match=r"dataloader_kwargs=\{'collate_fn': \.\.\.\}"):
        nodes.loader(texts, 2, collate_fn=len)  # type: ignore[call-arg]
