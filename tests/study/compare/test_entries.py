"""Which rate a strategy of a comparison takes."""

import pytest

from exogym.machines.remote.profile import RunProfile
from exogym.strategy import FedNovaStrategy, OptimSpec, SimpleReduceStrategy
from exogym.study.compare.entries import entries_of, setting_of
from exogym.study.tasks import load_task


@pytest.mark.parametrize(
    ("text", "rate", "chosen"),
    [
        ("fedavg", 0.002, 0.05),  # the task's rate is for AdamW
        ("fednova", 0.1, 0.05),
        ("fedavg:inner_optim=sgd", 0.1, 0.05),
        ("fednova:lr=0.3", 0.3, 0.3),
        ("fedavg:inner_optim=SGD:inner_lr=0.2", 0.2, 0.2),
        ("demo", 0.002, 0.05),  # the rate of DeMo's own rule, which steps SGD
    ],
)
def test_sgd_takes_its_own_rate_unless_the_user_chose_one(text: str, rate: float, chosen: float) -> None:
    task = load_task("digits")
    for lr, wanted in ((None, rate), (0.05, chosen)):
        setting = setting_of(task, None, None, None, 1, lr)
        (entry,) = entries_of(text, setting, own_lr=lr is not None).values()
        assert entry.strategy.inner.base_lr == wanted
        assert RunProfile("digits", text, lr=lr).make_strategy(task).inner.base_lr == wanted  # the rate on hosts


def test_sgd_by_name_has_a_rate_that_learns_and_torchs_class_keeps_torchs_rate() -> None:
    assert FedNovaStrategy().inner.base_lr == SimpleReduceStrategy("sgd").inner.base_lr == 0.1
    assert SimpleReduceStrategy(OptimSpec("sgd")).inner.base_lr == 1e-3
    assert SimpleReduceStrategy("sgd", lr=0.3).inner.base_lr == 0.3
