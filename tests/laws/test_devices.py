"""Only `core/base/devices.py` names kinds of devices. Every other file asks a `Device`, so accelerators are alike."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import exogym
from exogym.core.base import devices

PACKAGE = Path(exogym.__path__[0])
KINDS = {"cpu", "cuda", "mps", "xpu"}
OF_TORCH = {f"torch.{kind}" for kind in KINDS} | {"torch.backends.mps", "torch.backends.cuda"}
# What else names them, with the reason.
ALLOWED = {
    "core/base/devices.py": "the one place",
    "cli/ui.py": "examples for a form",
    "machines/remote/onhost/probe.py": "a host that needs no accelerator does not load torch",
    "clusters/kubernetes.py": "the resource of a pod",
    "machines/launch/config.py": "what backends carry; without an accelerator no more of the package is loaded",
}


def named(source: str) -> Iterator[str]:
    """Yield the texts and the attributes of torch in a source that name a kind of device. Docstrings are prose."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in KINDS:
                yield node.value
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in OF_TORCH:
            yield ast.unparse(node)


def test_one_file_names_kinds_of_devices() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    found = {path: list(named(source)) for path, source in sources.items()}
    assert {path: names for path, names in found.items() if names and path not in ALLOWED} == {}
    assert all(found[path] for path in ALLOWED)


def test_the_law_sees_names() -> None:
    source = 'torch.cuda.synchronize(); torch.backends.mps; x.to("cuda:0"); f"cuda:{3}"; x.cpu(); x.is_cpu'
    assert set(named(source)) == {"torch.cuda", "torch.backends.mps", "cuda:0", "cuda:"}


def test_a_full_device_is_not_one_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("full")

    devices._has_float64.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "zeros", full)
        devices.widest(torch.ones(1))
    assert devices.widest(torch.ones(1)).dtype == torch.float64
