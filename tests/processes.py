"""Real processes for tests: forked ones, those that meet over gloo or in shared memory, and worlds under torchrun."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from exogym.engine.forks import run_forked
from exogym.engine.wire import ProcessWire, place

WIDTH = 1001
PATIENCE_S = 100


# Looking around


def children():
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == os.getpid()]


def parent_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def family():
    """The processes that come from this one and have not ended: its children's too, and those whose parent has gone."""
    parents = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            state, parent, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            forked = Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
            if int(session) == os.getsid(0) and state not in "ZX" and forked:
                parents[pid] = int(parent)

    def is_ours(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid() or pid not in [os.getppid(), *parents]

    return sorted(pid for pid in parents if is_ours(pid))


def of_session(session):
    """The processes of a session that have not ended."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            state, _, _, leader = file.read().rpartition(")")[2].split()[:4]
            if int(leader) == session and state not in "ZX":
                found.append(int(pid))
    return found


# Forked ones


def apart(body, patience_s=60):
    """Run `body()` in a forked process and session of its own; return (pid, a function that waits for its status)."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            signal.alarm(patience_s)
            body()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    return pid


def ended(pid):
    """Wait for a process of `apart`; return its exit code, after all of its session are gone."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    until = time.monotonic() + 10
    while (left := of_session(pid)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
    return code


def everywhere(processes, body):
    """Run `body(rank)` in so many processes forked from this one; AssertionError with what failed in any."""
    pids = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(30)
                body(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * processes


# Wires


def matrix(nodes):
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(0))


def over_gloo(processes, nodes, folder, body, native=False):
    """Run `body(wire, rows)` in processes that meet over gloo."""
    placement = place(nodes, processes)

    def member(rank):
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), processes), rank=rank,
                                world_size=processes)  # fmt: skip
        body(ProcessWire(placement, native=native), matrix(nodes)[placement[rank]])
        dist.destroy_process_group()

    everywhere(processes, member)


def over_memory(processes, nodes, folder, body, native=False):
    """Run `body(wire, rows)` in processes that share memory."""
    placement = place(nodes, processes)
    run_forked(placement, lambda wire: body(wire, matrix(nodes)[wire.ranks]), native)


# Worlds


def launch(processes, folder, script):
    """Start the script under torchrun with `folder` and this one; return the launcher, which leads its own session."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(port), "script.py", ".", str(Path(__file__).parent)]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def end(launcher):
    """Wait for the launcher; return its exit code, once all of its session are gone."""
    code = launcher.wait(PATIENCE_S)
    until = time.monotonic() + 5
    while (left := of_session(launcher.pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left
    return code
