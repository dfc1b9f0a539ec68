"""Real processes for tests: forked ones, those that meet over gloo or in shared memory, and worlds under torchrun.

Importing torch takes a second of a core. So `python(...)` runs what `python WORDS...` would run in a fork of this
process, which has it, and `world(...)` does so for ranks; of each kind one test starts a Python of its own.
"""

import contextlib
import fcntl
import gc
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from exogym.core.engine.children import fork
from exogym.core.engine.engines import place
from exogym.core.engine.forks import run_forked
from exogym.core.engine.wire import ProcessWire

WIDTH = 1001
PATIENCE_S = 300  # a world trains every strategy of the table, on a machine that others use too


# Looking around


def children():
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == os.getpid()]


def descriptors():
    """This process's open descriptors, each with what it is, after what is garbage has closed its own."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


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
    pid = fork()
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
    until = time.monotonic() + 60
    while (left := of_session(pid)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
    return code


def start(words, cwd=".", env=None, files=(None, None, None)):
    """Run `python WORDS...` in a fork of this process, in a session of its own; return its process id.

    Args:
        words: a script, `-m` and a module, or `-c` and code, with arguments; `-W error` before it.
        env: the whole environment; this process's if None.
        files: descriptors for stdin, stdout and stderr; None: nothing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(PATIENCE_S)
        null = os.open(os.devnull, os.O_RDWR)
        for at, file in enumerate(files):
            os.dup2(null if file is None else file, at)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        code = 1
        try:
            code = _status(list(map(str, words)))
        finally:  # else it would go on as a second pytest
            os._exit(code)
    return pid


def _status(words):
    """Run the words of `python WORDS...` here; return the exit status."""
    for handler in list(logging.root.handlers):  # of pytest
        logging.root.removeHandler(handler)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    if words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    code = 1
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    measuring = sys.modules.get("coverage")
    if measuring is not None and (lines := measuring.Coverage.current()) is not None:  # which the exit would lose
        lines.stop()
        with contextlib.suppress(
            Exception
        ):  # a fork under a limit of its own may not write them; it must end all the same
            lines.save()
    return code


def python(*words, cwd=".", env=None, input=""):
    """Run `python WORDS...` in a fork of this process to its end; return subprocess's CompletedProcess, with texts."""
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(input)
        given.seek(0)
        pid = start(words, cwd, env, (given.fileno(), out.fileno(), err.fileno()))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


class Started:
    """`python WORDS...` in a fork of this process, which goes on meanwhile; of subprocess's Popen what tests use."""

    def __init__(self, *words, cwd=".", env=None, log=None):
        self.stdout = self.stderr = self.returncode = None
        if log is not None:
            self.pid = start(words, cwd, env, (None, log.fileno(), log.fileno()))
            return
        (out, theirs), (err, their_errors) = os.pipe(), os.pipe()
        self.pid = start(words, cwd, env, (None, theirs, their_errors))
        os.close(theirs)
        os.close(their_errors)
        self.stdout, self.stderr = open(out), open(err)  # noqa: SIM115

    def poll(self, how=os.WNOHANG):
        if self.returncode is None:
            done, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self):
        return self.poll(0)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self):
        """Wait for the end; return what it has said, which must fit a pipe."""
        self.wait()
        with self:
            return self.stdout.read(), self.stderr.read()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def everywhere(processes, body):
    """Run `body(rank)` in so many processes forked from this one; AssertionError with what failed in any."""
    pids = []
    for rank in range(processes):
        pid = fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(PATIENCE_S)
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


def in_groups(processes, folder, body):
    """Run `body(rank)` in processes that are in a process group of torch's, over gloo."""

    def member(rank):
        store = dist.FileStore(str(folder / "store"), processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
        dist.barrier()  # a process that ends first would break connections that another still makes
        body(rank)
        dist.destroy_process_group()

    everywhere(processes, member)


def told_in_groups(processes, folder, body):
    """Run `body(rank)` as `in_groups` does; return what each process returned, as JSON."""
    folder.mkdir(exist_ok=True)
    in_groups(processes, folder, lambda rank: (folder / f"{rank}.json").write_text(json.dumps(body(rank))))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def over_gloo(processes, nodes, folder, body, native=False):
    """Run `body(wire, rows)` in processes that meet over gloo."""
    placement = place(nodes, processes)
    in_groups(
        processes,
        folder,
        lambda rank: body(ProcessWire(placement, native=native), matrix(nodes)[placement[rank]]),
    )


def over_memory(processes, nodes, folder, body, native=False):
    """Run `body(wire, rows)` in processes that share memory."""
    placement = place(nodes, processes)
    run_forked(placement, lambda wire: body(wire, matrix(nodes)[wire.ranks]), native)


# Worlds


class Ports:
    """Ports that nobody else takes between the call of `free_port` and their use.

    They lie outside the range from which the system takes ports for others, if that range leaves some. Each process
    locks a block of them for as long as it lives, so tests and suites side by side have different ports.
    """

    def __init__(self):
        self.owner, self.block, self.turn, self.lock = 0, range(0), 0, None

    def take(self):
        if self.owner != os.getpid():
            self._lock_a_block()
        for _ in self.block:
            port = self.block[self.turn % len(self.block)]
            self.turn += 1
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
        raise AssertionError(f"no port of {self.block} is free")

    def _lock_a_block(self):
        folder = Path(tempfile.gettempdir(), f"exogym-test-ports-{os.getuid()}")
        folder.mkdir(exist_ok=True)
        for block in port_blocks():
            file = os.open(folder / str(block[0]), os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            self.owner, self.block, self.lock = os.getpid(), block, file
            return
        raise AssertionError("other tests hold all ports")


def port_blocks(size=50):
    """Return ranges of ports outside the range for outgoing connections and for servers at any free port.

    If that range leaves none, as 1024 to 65535 does, return ranges inside it.
    """
    first, last = 49152, 65535
    with contextlib.suppress(OSError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    below, above = range(10_000, first - size, size), range(last + 1, 65536 - size, size)
    starts = [*below, *above] or range(10_000, 65536 - size, size)
    return [range(start, start + size) for start in starts]


free_port = Ports().take


def world(processes, folder, script):
    """Run the script with `.` and this folder in forks that are ranks, as `launch` does; return the status and the log.

    As under torchrun the others are ended where one has failed; its status is returned.
    """
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": free_port(), "TORCHELASTIC_RESTART_COUNT": 0}
    running, codes = [], []
    with open(folder / "log", "w+") as log:
        for rank in range(processes):
            own = shared | {"RANK": rank, "LOCAL_RANK": rank}
            env = os.environ | {name: str(value) for name, value in own.items()}
            words = ["script.py", ".", Path(__file__).parent]
            running.append(start(words, folder, env, (None, log.fileno(), log.fileno())))
        while running:
            time.sleep(0.01)
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    running.remove(pid)
                    codes.append(os.waitstatus_to_exitcode(status))
            if any(codes):
                for pid in running:
                    os.killpg(pid, signal.SIGKILL)
        log.seek(0)
        return next(filter(None, codes), 0), log.read()


def launch(processes, folder, script):
    """Start the script under torchrun with `folder` and this one; return the launcher, which leads its own session."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    words = ["-m", "torch.distributed.run", "--nproc_per_node", processes, "--master_addr", "127.0.0.1"]
    words += ["--master_port", free_port(), "script.py", ".", Path(__file__).parent]
    with open(folder / "log", "w") as log:
        return Started(*words, cwd=folder, log=log)


def end(launcher):
    """Wait for the launcher; return its exit code, once all of its session are gone."""
    code = launcher.wait()
    until = time.monotonic() + 60
    while (left := of_session(launcher.pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left
    return code
