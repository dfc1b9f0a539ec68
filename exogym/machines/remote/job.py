"""`python -m exogym.machines.remote.job PROFILE`: the script that `exogym distributed-train` runs in each process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from exogym.machines.remote.network_trainer import NetworkTrainer
from exogym.machines.remote.profile import RunProfile


def main(words: Sequence[str]) -> None:
    """Train in this process and its process group, as the profile in `words[0]` (JSON) says."""
    profile = RunProfile(**json.loads(words[0]))
    task = profile.load()
    # Inside a world the hosts are given.
    hosts = {"master": "localhost"}
    model = task.make_model(profile.seed)
    trainer = NetworkTrainer(hosts, model, task.train, task.val, min_hosts=profile.min_hosts)
    trainer.fit(profile.make_strategy(task), **profile.fit_options(task))


if __name__ == "__main__":
    main(sys.argv[1:])
