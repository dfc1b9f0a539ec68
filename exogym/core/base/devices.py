"""A run's device, its threads and its memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from exogym.errors import ArgumentError

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the named torch device. "auto" chooses CUDA if it is available, otherwise Apple's MPS, otherwise the CPU.

    Raises:
        ArgumentError: the device is unknown, or this machine lacks it.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentError(f"device={device!r} is unknown: wanted 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from None
    if place.type not in ("cpu", "cuda", "mps"):
        raise ArgumentError(f"device={device!r} is not supported: wanted 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device={device!r}: torch sees no CUDA GPU here; use device='cpu' or 'auto'")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ArgumentError(f"device={device!r}: this machine lacks that GPU; wanted cuda:0 to cuda:{last}")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise ArgumentError(f"device={device!r}: no Apple GPU here; use device='cpu' or 'auto'")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """A context in which torch uses a single intra-op thread, if `device` is the CPU.

    So results do not depend on the number of threads, and training does not become very slow on a busy machine. At the
    end the context restores the earlier number of threads.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def free_memory_bytes(device: torch.device) -> int:
    """Return how many bytes of memory are free: on a GPU, the GPU's memory; on the CPU, the machine's memory and swap.

    For the CPU, the result is never above the memory that the process's control groups (cgroups) still allow.

    GPU memory that torch has reserved but does not use counts as free.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = total_memory_bytes(device)
    with contextlib.suppress(OSError, KeyError, ValueError):
        found = _numbers(PROC / "meminfo")
        free = 1024 * (found["MemAvailable:"] + found["SwapFree:"])
    return max(0, min([free, *_free_in_groups()]))


def _free_in_groups() -> Iterator[int]:
    """Yield the free bytes in each control group of this process, and in each group above.

    A group's cached files count as free: the system drops them before it refuses memory.
    """
    with contextlib.suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, kinds, own = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            top, names, of_all = (GROUPS / "memory", V1, "total_") if kinds else (GROUPS, V2, "")
            place = top / own.lstrip("/")
            for group in (place, *place.parents):  # in a container only the top may exist: the container's own group
                if not group.is_relative_to(top):
                    break
                with contextlib.suppress(OSError, KeyError, ValueError):  # "max": no limit
                    limit, used = (int((group / name).read_text()) for name in names)
                    held = _numbers(group / "memory.stat")
                    yield limit - used + held[f"{of_all}inactive_file"] + held[f"{of_all}active_file"]


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file, by each line's first word."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}


def total_memory_bytes(device: torch.device) -> int:
    """Return how many bytes of memory the device has: on a GPU, the GPU's memory; on the CPU, the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
