"""`python -m exogym.remote.job PROFILE`: what `exogym distributed-train` has every process of every host run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from exogym.remote.network_trainer import NetworkTrainer
from exogym.remote.profile import DEFAULT_BATCH, DEFAULT_STEPS, Profile


def main(words: Sequence[str]) -> None:
    """Train what the profile, given as JSON, describes, in the world of this process."""
    profile = Profile(**json.loads(words[0]))
    model, train, val, task = profile.problem()
    steps = profile.steps or (task.steps if task else DEFAULT_STEPS)
    # Inside a world the hosts are given.
    trainer = NetworkTrainer({"master": "localhost"}, model, train, val, min_hosts=profile.min_hosts)
    trainer.fit(
        profile.make_strategy(task),
        num_nodes=profile.nodes,
        max_steps=steps,
        batch_size=profile.batch_size or (task.batch_size if task else DEFAULT_BATCH),
        seed=profile.seed,
        balance=profile.balance,
        partitioner=task.partitioner if task else None,
        val_interval=max(1, steps // 10) if val is not None else None,
        save_dir=profile.save_dir,
        checkpoint_interval=profile.checkpoint_interval,
        max_restarts=profile.max_restarts,
        resume=profile.resume,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
