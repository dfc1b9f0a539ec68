"""A cluster of Ray's on the loopback, of several raylets, which tests add and kill.

`python tests/raylets.py COUNT CPUS` holds one and obeys lines on its stdin: "add", "kill". It is a process of its own,
since the cluster's processes end with the one that started them.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


class Raylets:
    """The process that holds the cluster, from outside.

    Attributes:
        environment: of a script that is to find the cluster.
    """

    def __init__(self, count: int, cpus: int = 1):
        self.environment = os.environ | LOOPBACK | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(count), str(cpus)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=self.environment, text=True,
        )  # fmt: skip
        self.environment["RAY_ADDRESS"] = self._heard()

    def say(self, word: str) -> None:
        """Have a raylet added, or the last one killed; return when it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self._heard()

    def actors(self) -> list[int]:
        """Return the processes of runs on this cluster."""
        return [pid for pid in _below(self.process.pid) if b"ray::ExoGym" in _words(pid)]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _heard(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("raylets: "):
                return line.removeprefix("raylets: ").strip()
        raise RuntimeError("the cluster did not come up")


@contextlib.contextmanager
def raylets(count: int, cpus: int = 1) -> Iterator[Raylets]:
    held = Raylets(count, cpus)
    try:
        yield held
    finally:
        held.close()


def _words(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _below(pid: int) -> list[int]:
    """Return the processes that come from `pid`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _hold(count: int, cpus: int) -> None:
    from ray.cluster_utils import Cluster

    given = {"num_cpus": cpus, "node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**given, "include_dashboard": False})
    more = [cluster.add_node(**given) for _ in range(count - 1)]
    print("raylets:", cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            more.append(cluster.add_node(**given))
        else:  # as the system would: nobody is told
            os.kill(more.pop().all_processes["raylet"][0].process.pid, signal.SIGKILL)
        print("raylets: done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _hold(int(sys.argv[1]), int(sys.argv[2]))
