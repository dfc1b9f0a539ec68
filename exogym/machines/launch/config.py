"""The settings of a launch: its processes, machines and restarts, and the backends that work on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from exogym.errors import ArgumentError, check_choice, check_count, check_number, checked

DEFAULT_PORT = 29500
BACKENDS = ("gloo", "nccl", "mpi")
BACKEND_VARIABLE = "EXOGYM_BACKEND"  # set by the launcher, read by init_process_group
FIRST_RANK = "EXOGYM_FIRST_RANK"  # environment variable: this launch's first rank in a larger run


@dataclass(frozen=True)
class LaunchConfig:
    """The settings of a launch, which are checked when the object is created.

    Args:
        nproc_per_node: number of processes to start on this machine.
        nnodes: number of machines. Start the launcher once on each machine.
        node_rank: number of this machine, 0 to nnodes - 1. Machine 0 has the first ranks.
        master_addr: name or address of machine 0, required if there are several machines. A single machine uses its
            loopback.
        master_port: port of machine 0 at which the other machines connect. Default: 29500 with several machines, a free
            port with one machine.
        backend: "gloo" or "nccl", for scripts whose `init_process_group()` names no backend. Default: a backend
            that fits the machine.
        max_restarts: how often all processes may be restarted after a failure.
        monitor_interval: seconds between checks whether the processes are still running.
        start_timeout: whole seconds within which the launchers of all machines must connect.
        log_dir: folder for each rank's output, which is appended to `training_rank_{rank}.log`, or None for no files.

    Raises:
        ArgumentError: a setting is invalid. The message gives the allowed values.

    >>> LaunchConfig(nproc_per_node=4).nnodes
    1
    >>> LaunchConfig(nproc_per_node=4, nnodes=2)
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: nnodes=2 needs master_addr=: the name or address of machine 0
    """

    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    backend: str | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    start_timeout: int = 600
    log_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("nproc_per_node", "nnodes", "start_timeout"):
            check_count(name, getattr(self, name))
        for name in ("node_rank", "max_restarts"):
            check_count(name, getattr(self, name), least=0)
        if self.node_rank >= self.nnodes:
            raise ArgumentError(f"node_rank={self.node_rank} is too large for nnodes={self.nnodes}: numbers start at 0")
        if self.nnodes > 1 and self.master_addr is None:
            raise ArgumentError(f"nnodes={self.nnodes} needs master_addr=: the name or address of machine 0")
        if self.master_addr is not None and (not isinstance(self.master_addr, str) or not self.master_addr.strip()):
            raise ArgumentError(f"master_addr={self.master_addr!r} must be the name or address of machine 0")
        if self.master_port is not None:
            check_count("master_port", self.master_port)
            if self.master_port > 65535:
                raise ArgumentError(f"master_port={self.master_port} must be a port, 1 to 65535")
        check_number("monitor_interval", self.monitor_interval, over=0, more=" seconds")
        if self.log_dir is not None and not isinstance(self.log_dir, str | os.PathLike):
            raise ArgumentError(f"log_dir={self.log_dir!r} must be the path of a folder")
        if self.backend is not None:
            check_backend(self.backend)
            if self.backend == "mpi":
                raise ArgumentError(
                    "this launcher cannot start MPI processes (backend='mpi'). Run mpirun -n 4 python script.py, and "
                    "call init_process_group('mpi') in the script"
                )

    @property
    def address(self) -> str:
        """Name or address of machine 0, to which the other machines connect."""
        return self.master_addr or "localhost"

    @property
    def port(self) -> int:
        """Port of machine 0, to which the other machines connect; 0 means any free port."""
        return self.master_port or (DEFAULT_PORT if self.nnodes > 1 else 0)

    @property
    def endpoint(self) -> str:
        """Machine 0's address and port as one text, such as "10.0.0.1:29500"."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


LaunchConfig.__init__ = checked(LaunchConfig.__init__)  # type: ignore[method-assign]


def _missing(backend: str) -> str | None:
    """Return why `backend` does not work on this machine, or None if it works."""
    import torch  # imported only here, because the page and the hosts' checks don't need torch
    import torch.distributed as dist

    if not dist.is_available():
        return "this build of torch has no torch.distributed; install another build"
    if not dist.is_backend_available(backend):
        cure = {"mpi": "build torch with MPI", "nccl": "install a build of torch for CUDA"}
        return f"this build of torch has no {backend}; {cure.get(backend, 'install another build')}"
    found = torch.accelerator.current_accelerator(check_available=True)
    kinds = dist.Backend.backend_capability.get(backend, [])
    if kinds and not {"cpu", found.type if found else ""} & set(kinds):
        return f"torch sees no {kinds[0]} device here"
    return None


def available_backends() -> list[str]:
    """Return the backends that work on this machine.

    >>> "gloo" in available_backends()
    True
    """
    return [backend for backend in BACKENDS if _missing(backend) is None]


def check_backend(backend: str) -> None:
    """Raise ArgumentError unless `backend` is known and works on this machine.

    >>> check_backend("glou")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: backend='glou' is not one of 'gloo', 'nccl', 'mpi': did you mean 'gloo'?
    """
    check_choice("backend", backend, BACKENDS)
    if reason := _missing(backend):
        usable = ", ".join(map(repr, available_backends())) or "none"
        raise ArgumentError(f"backend={backend!r} cannot be used: {reason} (usable here: {usable})")
