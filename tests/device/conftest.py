"""The fake device, for tests that `make device-test` runs: a process that has it has it until its end."""

import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils import cpp_extension

collect_ignore = ["fake.py"]  # whoever imports it gets the device
if "EXOGYM_FAKE_DEVICE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def compiled() -> ModuleType:
    if sys.platform != "linux":
        pytest.skip("the fake device needs Linux")
    compiler = cpp_extension.get_cxx_compiler()
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if lacks := [
        str(it) for it, is_there in ((compiler, shutil.which(compiler)), (headers, headers.exists())) if not is_there
    ]:
        pytest.skip(f"the fake device is compiled, and this machine lacks {' and '.join(lacks)}")
    from device import fake

    return fake


@pytest.fixture(autouse=True)
def fake(compiled: ModuleType) -> Iterator[ModuleType]:
    """The device, with the memory of earlier tests given back, and with its counters at zero."""
    warnings.filterwarnings("ignore", "An output with one or more elements was resized")  # torch's own kernels do so
    compiled.restore()
    yield compiled
    compiled.restore()
