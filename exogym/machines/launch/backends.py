"""The communication backends of `exogym.distributed`, and whether each backend works on this machine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from exogym.errors import ArgumentError, check_choice

BACKENDS = ("gloo", "nccl", "mpi")
BACKEND_VARIABLE = "EXOGYM_BACKEND"  # set by the launcher, read by init_process_group


def _missing(backend: str) -> str | None:
    """Return why `backend` does not work on this machine, or None if it works."""
    if not dist.is_available():
        return "this build of torch has no torch.distributed; install another build"
    if not dist.is_backend_available(backend):
        cure = {"mpi": "build torch with MPI", "nccl": "install a build of torch for CUDA"}
        return f"this build of torch has no {backend}; {cure.get(backend, 'install another build')}"
    if backend == "nccl" and not torch.cuda.is_available():
        return "torch sees no CUDA GPU here"
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
