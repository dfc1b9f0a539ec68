"""The small models: what they return, causality, tied weights, the first loss."""

import math

import pytest
import torch
from torch import nn

from exogym.errors import ArgumentError
from exogym.models import MLP, CharGPT, SmallCNN


def gpt(**changes: int | float) -> CharGPT:
    torch.manual_seed(0)
    return CharGPT(**{"vocab_size": 65, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32, **changes})


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_gpt_sees_no_future() -> None:
    model, x = gpt(), torch.randint(0, 65, (2, 16))
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 65
    before, after = model.logits(x), model.logits(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert all(not torch.allclose(before[:, t], after[:, t], atol=1e-5) for t in range(9, 16))  # and it does look back


def test_gpt_attention_equals_the_formula() -> None:
    model = gpt(n_layer=1)
    attend, h = model.blocks[0].attend, torch.randn(3, 16, 32)
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in attend.qkv(h).chunk(3, dim=-1))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    wanted = attend.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(3, 16, 32))
    torch.testing.assert_close(attend(h), wanted)


def test_gpt_head_is_the_embedding_and_counts_once() -> None:
    model = gpt()
    assert model.head.weight is model.tokens.weight
    V, T, L, d = 65, 16, 2, 32
    assert count(model) == V * d + T * d + L * (12 * d * d + 2 * d) + d
    assert "head.weight" in model.state_dict() and "head.weight" not in dict(model.named_parameters())


def test_gpt_starts_at_the_loss_of_knowing_nothing() -> None:
    x, y = torch.randint(0, 65, (2, 8, 16))
    assert gpt()((x, y))["loss"].item() == pytest.approx(math.log(65), abs=0.1)
    torch.manual_seed(0)
    wild = gpt()
    nn.init.normal_(wild.tokens.weight)  # torch's own initialisation, tied: far off
    assert wild((x, y))["loss"].item() > 2 * math.log(65)


def test_gpt_writes_softly_to_the_residual_stream() -> None:
    model = gpt(n_embd=128, n_layer=8)
    stds = {name: w.std().item() for name, w in model.named_parameters() if w.ndim == 2}
    assert stds["blocks.3.attend.qkv.weight"] == pytest.approx(0.02, rel=0.05)
    for name in ("blocks.3.attend.out.weight", "blocks.3.mlp.2.weight"):
        assert stds[name] == pytest.approx(0.02 / 4, rel=0.05)


def test_gpt_learns_and_generates() -> None:
    model, cycle = gpt(vocab_size=5, block_size=8), torch.arange(9) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model((cycle[None, :-1], cycle[None, 1:]))["loss"].backward()
        optimizer.step()
    out = model.generate(torch.tensor([[0, 1]]), 5, temperature=0.1)
    assert out.tolist() == [[0, 1, 2, 3, 4, 0, 1]] and model.training


def test_gpt_dropout_only_in_training() -> None:
    model, x = gpt(dropout=0.5), torch.randint(0, 65, (2, 16))
    assert not torch.equal(model.logits(x), model.logits(x))
    model.eval()
    assert torch.equal(model.logits(x), model.logits(x))


@pytest.mark.parametrize(
    ("model", "shape", "parameters"),
    [
        (lambda: MLP([64, 32, 10]), (64,), 2410),
        (lambda: MLP([784, 200, 200, 10]), (1, 28, 28), 199_210),
        (lambda: SmallCNN(1, 28), (1, 28, 28), 8 * 10 + 16 * 73 + 64 * (16 * 49 + 1) + 650),
        (lambda: SmallCNN(3, 32, width=16), (3, 32, 32), 16 * 28 + 32 * 145 + 64 * (32 * 64 + 1) + 650),
    ],
)
def test_classifiers_return_the_mean_cross_entropy(model, shape, parameters) -> None:
    made, x, y = model(), torch.randn(6, *shape), torch.randint(0, 10, (6,))
    assert count(made) == parameters
    out = made((x, y))
    assert out["logits"].shape == (6, 10)
    wanted = -out["logits"].log_softmax(-1)[torch.arange(6), y].mean()
    torch.testing.assert_close(out["loss"], wanted)
    out["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters())


def test_generate_leaves_each_submodule_its_mode() -> None:
    model = CharGPT(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=4)
    model.blocks.eval()
    before = [module.training for module in model.modules()]
    model.generate(torch.zeros(1, 1, dtype=torch.int64), 2)
    assert [module.training for module in model.modules()] == before and any(before) and not all(before)


def test_torchs_generator_decides_the_weights() -> None:
    for make in (lambda: MLP([4, 3]), lambda: SmallCNN(1, 8), lambda: gpt()):
        torch.manual_seed(1)
        first = make().state_dict()
        torch.manual_seed(1)
        assert all(torch.equal(a, b) for a, b in zip(first.values(), make().state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP([5]), "expected at least the numbers of features and classes"),
        (lambda: MLP([5, 0]), "sizes=0"),
        (lambda: MLP(size=[5, 2]), "did you mean 'sizes'"),
        (lambda: SmallCNN(size=3), "size=3"),
        (lambda: SmallCNN(1, 28)((torch.zeros(1, 3, 28, 28), torch.tensor([0]))), r"shape \(3, 28, 28\), but"),
        (lambda: CharGPT(65, n_embd=30, n_head=4), "multiple of n_head=4"),
        (lambda: CharGPT(65, dropout=1.0), "dropout=1.0"),
        (lambda: gpt().logits(torch.zeros(1, 17, dtype=torch.long)), "17 tokens.*block_size=16"),
    ],
)
def test_wrong_use_is_explained(make, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
