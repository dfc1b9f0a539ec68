"""What is done right before torch's agent starts the processes, at the first attempt and at each restart."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from exogym.launch.launcher import kill_what_is_left
from exogym.launch.output import Output
from exogym.launch.rendezvous import Node
from exogym.progress import notice


class Attempts(DefaultLogsSpecs):
    """Prepares the environment of the ranks; torch calls `reify` right before it starts them.

    Args:
        folder: where the ranks leave their error files.
        output: told which rank each process of this node has.
        node: knows the number of the attempt, the same on all nodes.
        environment: added to each rank's environment.
        first_rank: added to the ranks in what is printed.
    """

    def __init__(self, folder: Path, output: Output, node: Node, environment: dict[str, str], first_rank: int = 0):
        super().__init__(log_dir=str(folder / "errors"))
        self.folder, self.output, self.node, self.environment = folder, output, node, environment
        self.world_size, self.first_rank = 0, first_rank

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        kill_what_is_left(self.folder)
        if self.node.attempt > 0:
            notice(f"a process failed; starting all again (restart {self.node.attempt})")
        for local_rank, env in envs.items():
            env.update(self.environment)
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.node.attempt)
            self.output.ranks[local_rank] = self.first_rank + int(env["RANK"])
            self.world_size = int(env["WORLD_SIZE"])
        return super().reify(envs)
