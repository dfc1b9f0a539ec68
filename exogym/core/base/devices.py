"""A run's device: one value for the CPU and for any accelerator that torch names, its threads and its memory.

Only this file names kinds of devices; other files ask a `Device` (`tests/laws/test_devices.py`), so CUDA, MPS, XPU, and
devices that register themselves with torch take the same path.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from exogym.errors import ArgumentError

CPU = torch.device("cpu")
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True)
class Device:
    """A run's interface to a device. `place` is the device's name in torch.

    >>> Device.named("cpu").is_cpu, Device.named("cpu").backend, Device(torch.zeros(1).device) == Device(CPU)
    (True, 'gloo', True)
    """

    place: torch.device

    @classmethod
    def accelerator(cls) -> Device | None:
        """Return the accelerator that torch uses in this process, or None if this machine has none."""
        kind = torch.accelerator.current_accelerator(check_available=True)
        return None if kind is None else cls(torch.device(kind.type, torch.accelerator.current_device_index()))

    @classmethod
    def named(cls, name: str | torch.device) -> Device:
        """Return the named device. "auto" names the accelerator that torch finds, or the CPU if there is none.

        Raises:
            ArgumentError: the device is unknown, or this machine lacks it.
        """
        if name == "auto":
            return cls.accelerator() or cls(CPU)
        try:
            place = torch.device(name)
        except (RuntimeError, TypeError, ValueError):
            raise ArgumentError(
                f"device={name!r} is unknown: use 'auto', 'cpu', or an accelerator such as 'cuda', 'cuda:0' or 'mps'"
            ) from None
        if place.type == CPU.type:
            return cls(CPU)  # doesn't touch the accelerator, because a process that uses one can't be forked
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or place.type != found.type:
            raise ArgumentError(f"device={name!r}: torch sees no {place.type} device here; use device='cpu' or 'auto'")
        index, count = place.index or 0, torch.accelerator.device_count()
        if index >= count:
            wanted = f"{place.type}:0" + (f" to {place.type}:{count - 1}" if count > 1 else "")
            raise ArgumentError(f"device={name!r} does not exist on this machine: use {wanted}")
        return cls(torch.device(place.type, index))

    @classmethod
    def of_group(cls, group: Any = None) -> Device:
        """Return the device whose tensors a process group can send: the CPU, if the group's backend supports it."""
        kinds = dist.Backend.backend_capability.get(dist.get_backend(group), [CPU.type])
        return cls(CPU) if CPU.type in kinds else cls.named("auto")

    @property
    def is_cpu(self) -> bool:
        return self.place.type == CPU.type

    @property
    def backend(self) -> str:
        """The backend of `torch.distributed` for tensors on this device; gloo, if this build of torch has no other."""
        name = dist.Backend.default_device_backend_map.get(self.place.type, "gloo")
        return name if dist.is_backend_available(name) else "gloo"

    @property
    def model(self) -> str:
        """The device's model, such as "NVIDIA H200", or "" if unknown."""
        return str(self._own("get_device_name", lambda place: "")(self.place))

    def make_current(self) -> None:
        """Make this device torch's default for its kind."""
        if not self.is_cpu:
            torch.accelerator.set_device_index(self.place)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.place)

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` on this device. A device with its own memory copies `x` asynchronously from pinned memory."""
        is_far = x.is_cpu and self._has_memory
        return (x.pin_memory() if is_far else x).to(self.place, non_blocking=True)

    def _own(self, name: str, otherwise: Any) -> Any:
        """Return a function of the device's module in torch, or `otherwise` if the module doesn't have it."""
        return getattr(torch.get_device_module(self.place), name, otherwise)

    # Random numbers

    def seed(self, seed: int) -> None:
        """Seed torch's default generators of the CPU and of this device."""
        torch.default_generator.manual_seed(seed)
        if self.is_cpu:
            return
        index = self.place.index or 0
        if generators := self._own("default_generators", ()):
            generators[index].manual_seed(seed)
        else:
            with torch.accelerator.device_index(index):
                self._own("manual_seed", None)(seed)

    def random_states(self) -> list[torch.Tensor]:
        """Return the states of torch's default generators, of the CPU and of this device."""
        own = [] if self.is_cpu else [self._own("get_rng_state", None)(self.place)]
        return [torch.default_generator.get_state(), *own]

    def forked_random(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that restores torch's default generators at its end."""
        return torch.random.fork_rng([] if self.is_cpu else [self.place], device_type=self.place.type)

    # Memory

    def free_bytes(self) -> int:
        """Return the free memory in bytes: an accelerator's own, or else the machine's, including swap.

        The machine's free memory is limited by the process's control groups (cgroups).

        Memory that torch has reserved but does not use counts as free.
        """
        if self._has_memory:
            own = self._own("mem_get_info", None)(self.place)
            reserved, allocated = (self._own(name, lambda place: 0) for name in ("memory_reserved", "memory_allocated"))
            return int(own[0] + reserved(self.place) - allocated(self.place))
        free = self.total_bytes()
        with contextlib.suppress(OSError, KeyError, ValueError):
            found = _numbers(PROC / "meminfo")
            free = 1024 * (found["MemAvailable:"] + found["SwapFree:"])
        return max(0, min([free, *_free_in_groups()]))

    def total_bytes(self) -> int:
        """Return the device's memory in bytes: an accelerator's own, or else the machine's."""
        if self._has_memory:
            return int(self._own("mem_get_info", None)(self.place)[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_bytes(self) -> int | None:
        """Return torch's peak use of the accelerator's own memory in bytes, or None if it has none."""
        peak = None if self.is_cpu else self._own("max_memory_allocated", None)
        return None if peak is None else int(peak(self.place))

    @property
    def _has_memory(self) -> bool:
        """Whether the device has its own memory. Others, such as MPS, share the machine's."""
        return not self.is_cpu and self._own("mem_get_info", None) is not None


def widest(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in its device's widest float: float64, or float32 on devices without float64, such as MPS."""
    return x.to(torch.float64 if _has_float64(x.device.type) else torch.float32)


@functools.cache
def _has_float64(kind: str) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=kind)
    except torch.OutOfMemoryError:
        raise  # doesn't report float64, and the answer holds for the whole process
    except (TypeError, RuntimeError):
        return False
    return True


def is_accelerator_used() -> bool:
    """Return whether this process has begun to use an accelerator, so that it can't be forked."""
    kind = torch.accelerator.current_accelerator()
    return kind is not None and bool(Device(kind)._own("is_initialized", bool)())


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """A context in which torch uses a single intra-op thread if `device` is the CPU.

    Results then don't depend on the number of threads, and training doesn't become very slow on a busy machine. The
    earlier number of threads is restored at the end.
    """
    before = torch.get_num_threads()
    if device.type == CPU.type:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    """Return a dict from each line's first word to its number."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}
