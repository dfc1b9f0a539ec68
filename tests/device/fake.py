"""A device that isn't the CPU: import this module before a tensor is made, and torch's accelerator is "fake".

`make device-test` runs the tests in this folder on it. A process keeps the device until it ends, so no other test may
import this module.
"""

import atexit
import collections
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import types
from pathlib import Path

import torch
from torch.utils import cpp_extension

import exogym.core.base.devices

SOURCE = Path(__file__).with_name("fake.cpp")
DEVICES = 2
PACKAGE = f"{os.sep}exogym{os.sep}"


def built() -> Path:
    """Return the compiled device. It is compiled once for a source and a version of torch (half a minute)."""
    about = f"{torch.__version__} {sys.version}".encode()
    name = f"exogym-fake-{os.getuid()}-{hashlib.sha256(SOURCE.read_bytes() + about).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir(), name)
    library = folder / f"fake_device{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        half = folder / f"{os.getpid()}.so"
        includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=fake_device"]
        compiler = cpp_extension.get_cxx_compiler()
        subprocess.run([compiler, *flags, *includes, str(SOURCE), *libraries, "-o", str(half)], check=True)
        half.rename(library)  # whole at once: two processes may compile it at the same time
    if library.stat().st_uid != os.getuid():
        raise PermissionError(f"{library} belongs to another user: remove it")
    return library


spec = importlib.util.spec_from_file_location("fake_device", built())
assert spec is not None and spec.loader is not None
device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(device)

# What happened, and where

EVENTS: collections.Counter = collections.Counter()  # (event, line of the package)


def _heard(event: str) -> None:
    frames = traceback.extract_stack()[:-1]
    own = [frame for frame in frames if PACKAGE in frame.filename] or frames
    EVENTS[event, f"{own[-1].filename.rpartition(PACKAGE)[2]}:{own[-1].lineno}"] += 1


def reset() -> None:
    """Count anew."""
    device.reset()
    EVENTS.clear()


def launches() -> int:
    """Return how many kernels were launched since `reset`."""
    return sum(device.launches().values())


def count(kind: str) -> int:
    """Return how many events of a kind ("sync", "h2d", "d2h") there were since `reset`."""
    return sum(times for (event, _), times in EVENTS.items() if event.startswith(kind))


def where(kind: str) -> list[str]:
    """Return the events of a kind with their lines, the most frequent first."""
    return [f"{times} {event} {line}" for (event, line), times in EVENTS.most_common() if event.startswith(kind)]


# torch's module for the device


def _index(place=None) -> int:
    if isinstance(place, int):
        return place
    index = None if place is None else torch.device(place).index
    return device.current() if index is None else index


def _memory(place=None) -> tuple[int, int]:
    used, _, limit = device.memory()
    return limit - used, limit


module = types.ModuleType("torch.fake")
vars(module).update(
    is_available=lambda: True, is_initialized=lambda: device.memory()[1] > 0, _is_in_bad_fork=lambda: False,
    device_count=lambda: DEVICES, current_device=device.current,
    set_device=lambda place: device.make_current(_index(place)),
    synchronize=lambda place=None: _heard("sync device"), _lazy_init=lambda: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    get_rng_state=lambda place=None: device.generator(_index(place)).get_state(),
    set_rng_state=lambda state, place=None: device.generator(_index(place)).set_state(state),
    manual_seed=lambda seed: device.generator(device.current()).manual_seed(seed),
    manual_seed_all=lambda seed: [device.generator(i).manual_seed(seed) for i in range(DEVICES)],
    mem_get_info=_memory, max_memory_allocated=lambda place=None: device.memory()[1],
)  # fmt: skip
torch.utils.rename_privateuse1_backend("fake")
device.setup(_heard)
torch._register_device_module("fake", module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

_library = torch.library.Library("aten", "IMPL")


def _dropout(x, p, train=None):
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask * (1 / (1 - p)), mask


_library.impl(
    "native_dropout", _dropout, "PrivateUse1"
)  # it takes no generator, so the CPU's kernel would draw the CPU's
atexit.register(time.sleep, 0.1)  # torch's threads for backward may still free Python's objects, and must not later


def restore() -> None:
    """Give the device its memory, its float64 and its own random numbers again, and count anew."""
    device.set_limit(1 << 40)
    device.set_float64(True)
    device.set_draws_as_cpu(False)
    exogym.core.base.devices._has_float64.cache_clear()
    reset()
