"""The launcher starts the processes, shows what they print, and leaves nothing behind whichever way they end."""

import contextlib
import importlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
from paths import ROOT
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from exogym.core.base.processes import described
from exogym.errors import ArgumentError, TrainingError
from exogym.machines.launch import DistributedLauncher, LaunchConfig, launch_distributed_training
from exogym.machines.launch.__main__ import main, split
from exogym.machines.launch.attempts import Attempts, describe, exit_code, first_failure
from exogym.machines.launch.config import FIRST_RANK
from exogym.machines.launch.folders import OWNER, PREFIX, is_left, launch_folder
from exogym.machines.launch.output import RankOutput
from exogym.machines.launch.rendezvous import NAME, Machine, check_address, register

PAGE = ROOT / "docs" / "distributed.md"
WAIT_S = 300.0

# What the scripts below begin with: `say(name)` leaves the process id in a file, `wait(name, n)` waits for n of those.
HEAD = """
import os, signal, subprocess, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
here = os.path.dirname(os.path.abspath(__file__))
def say(name):
    open(os.path.join(here, f"{name}.{os.getpid()}.part"), "w").close()
    os.rename(os.path.join(here, f"{name}.{os.getpid()}.part"), os.path.join(here, f"{name}.{os.getpid()}"))
def wait(name, count):
    while sum(f.startswith(name + ".") and not f.endswith(".part") for f in os.listdir(here)) < count:
        time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and returns its path."""

    def write(body: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def start():
    """Return a function that starts `python WORDS...`; what still runs when the test ends is stopped."""
    started = []

    def run(*words: object, **options) -> processes.Started:
        started.append(processes.Started(*words, **options))
        return started[-1]

    yield run
    for process in started:
        with process:
            process.terminate()


def said(folder: Path, name: str, count: int = 0) -> list[int]:
    """Return the ids of the processes that said `name`, once there are `count`."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = [int(path.suffix[1:]) for path in folder.glob(f"{name}.[0-9]*") if path.suffix != ".part"]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, f"only {len(found)} of {count} processes said {name!r}"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Say whether a process runs (one that only waits to be collected does not)."""
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ended(*pids: int) -> bool:
    """Say whether all these processes end soon."""
    deadline = time.monotonic() + WAIT_S
    while any(runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free(port: int) -> bool:
    """Say whether nobody listens at a port of the loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# Running


def test_every_process_finds_its_place(script, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    path = script(
        """
        names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "EXOGYM_BACKEND")
        print(rank, attempt, *(os.environ[name] for name in names), os.environ["MASTER_PORT"].isdigit())
        print(__name__, sys.argv == [__file__, *sys.argv[1:]], sys.path[0] == here, sys.argv[1:])
        print("to stderr", file=sys.stderr)
        """
    )
    given = ["--lr", "0.1", "two words", "$HOME $$ ${local_rank}", "ü", ""]
    assert launch_distributed_training(path, *given, 7, nproc_per_node=3, backend="gloo") == 0
    out, err = capfd.readouterr()
    for rank in range(3):
        assert f"[rank {rank}] {rank} 0 3 {rank} 3 127.0.0.1 1 gloo True\n" in out
        assert f"[rank {rank}] __main__ True True {[*given, '7']}\n" in out
        assert f"[rank {rank}] to stderr\n" in err
    assert len(out.splitlines()) == 6


def test_what_is_set_is_kept(script, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("EXOGYM_BACKEND", raising=False)
    path = script("print(os.environ['OMP_NUM_THREADS'], 'EXOGYM_BACKEND' in os.environ)")
    assert DistributedLauncher(LaunchConfig()).launch(path) == 0
    assert capfd.readouterr().out == "[rank 0] 3 False\n"


def test_a_module_and_processes_that_the_script_starts(script, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(
        """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(sys.argv[1:], pool.map(double, [1, 2]))
        """,
        "doubling.py",
    )
    assert DistributedLauncher(LaunchConfig()).launch("doubling", "x", module=True) == 0
    assert DistributedLauncher(LaunchConfig()).launch("doubling.py", "y") == 0
    assert capfd.readouterr().out == "[rank 0] ['x'] [2, 4]\n[rank 0] ['y'] [2, 4]\n"


def test_the_caller_is_left_as_it_was(script, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")
    watched = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    log = logging.getLogger("torch.distributed.elastic.agent.server.api")
    importlib.import_module(log.name)  # the first import sets the logger's level
    before, threads = (dict(os.environ), [signal.getsignal(s) for s in watched], log.level), set(threading.enumerate())
    assert launch_distributed_training(script("sys.exit(4)")) == 4
    assert before == (dict(os.environ), [signal.getsignal(s) for s in watched], log.level)
    assert set(threading.enumerate()) <= threads


# Failing


def test_a_failing_rank_ends_all_and_shows_why(script, tmp_path, capfd):
    path = script(
        """
        say("up")
        wait("up", 3)
        if rank == 1:
            def deep():
                raise ValueError("boom")
            deep()
        time.sleep(600)
        """
    )
    assert launch_distributed_training(path, nproc_per_node=3) == 1
    err = capfd.readouterr().err
    pids = said(tmp_path, "up")
    assert len(pids) == 3 and ended(*pids)
    trace = [line.removeprefix("[rank 1] ") for line in err.splitlines() if line.startswith("[rank 1]")]
    assert trace[0] == "Traceback (most recent call last):" and trace[-1] == "ValueError: boom"
    files = [re.search(r'File "(.*?)"', line)[1] for line in trace if "File" in line]
    assert files == [str(path)] * 2  # the user's own frames, and no others
    last = err.splitlines()[-1]
    assert last.startswith("exogym: rank 1 of 3 ended with exit code 1: ValueError: boom; what it printed is above")


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3: SystemExit: 3"),
        pytest.param("os._exit(5)", 5, "ended with exit code 5;", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by signal 9 (SIGKILL)"),
        ("import no_such_module", 1, "ended with exit code 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_ways_to_fail(script, tmp_path, capfd, end, code, words):
    path = script(f"say('up')\nwait('up', 2)\nif rank == 1: {end}\ntime.sleep(600)")
    assert launch_distributed_training(path, nproc_per_node=2) == code
    assert ended(*said(tmp_path, "up", 2))
    assert f"exogym: rank 1 of 2 {words}" in capfd.readouterr().err


def test_a_script_that_is_no_python(tmp_path, capfd):
    (tmp_path / "bad.py").write_text("print('x'\n")
    assert launch_distributed_training(tmp_path / "bad.py") == 1
    assert "SyntaxError: '(' was never closed" in capfd.readouterr().err


def test_what_a_failed_rank_had_started_is_ended_too(script, tmp_path):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    path = script(
        f"""
        child = subprocess.Popen([sys.executable, "-c", {stubborn!r}], stdout=subprocess.PIPE)
        child.stdout.read(1)
        open(os.path.join(here, f"child.{{child.pid}}"), "w").close()
        wait("child", 2)
        if rank == 1:
            os._exit(7)
        time.sleep(600)
        """
    )
    assert launch_distributed_training(path, nproc_per_node=2) == 7
    children = said(tmp_path, "child")
    assert len(children) == 2 and ended(*children)


LOST = "lost its connection to another rank, which failed first"


@pytest.mark.parametrize(
    ("error", "code", "printed", "end"),
    [
        ("RuntimeError('[pair.cc] Connection closed by peer [h]:1. This is\\nframe')", 1,
         f"exogym: this rank {LOST} ([pair.cc] Connection closed by peer [h]:1)", LOST),
        pytest.param("MemberLost('a member')", 1, f"exogym: this rank {LOST} (a member)", LOST, marks=pytest.mark.slow),
        ("ArgumentError('steps=0 is too few')", 1, "ArgumentError: steps=0 is too few",
         "ended with exit code 1: ArgumentError: steps=0 is too few"),
        pytest.param("Stopped(None, 3)", 130, "exogym: stopped by a signal to another process after step 3", LOST,
                     marks=pytest.mark.slow),
        # The controls: errors of the script's own keep their tracebacks.
        ("ValueError('Connection closed by peer')", 1, None, "ended with exit code 1: ValueError: Connection closed"),
        pytest.param("RuntimeError('Connection')", 1, None, "ended with exit code 1: RuntimeError: Connection",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_error_that_says_all_itself_is_one_line(script, capfd, error, code, printed, end):
    rooms = {
        "ArgumentError": "exogym.errors",
        "Stopped": "exogym.errors",
        "MemberLost": "exogym.machines.remote.elastic.wire",
    }
    name = error.partition("(")[0]
    path = script(f"from {rooms.get(name, 'builtins')} import {name}\nraise {error}")
    assert launch_distributed_training(path) == code
    *lines, last = capfd.readouterr().err.splitlines()
    assert last.startswith(f"exogym: rank 0 of 1 {end}")
    if printed is None:
        assert lines[0] == "[rank 0] Traceback (most recent call last):" and len(lines) > 2
    else:
        assert lines == [f"[rank 0] {printed}"]


def failure(
    tmp_path, rank: int, exitcode: int, time_s: float | None, lost: bool = False, pid: int = 1
) -> ProcessFailure:
    path = tmp_path / f"{rank}.json"
    if time_s is not None:
        flag = "true" if lost else "false"
        extra = f'{{"py_callstack": "", "timestamp": "{int(time_s)}", "time_s": {time_s}, "lost": {flag}}}'
        path.write_text(f'{{"message": {{"message": "E: {rank}", "extraInfo": {extra}}}}}')
    return ProcessFailure(local_rank=rank, pid=pid, exitcode=exitcode, error_file=str(path))


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([(1, 100.9), (1, 100.2)], 1),  # both in one second
        ([(1, 100.2), (-9, None), (-15, None)], 1),  # rank 0 only lost its peer
        ([(-15, None), (3, None)], 1),
        ([(-15, None), (1, 100.0)], 1),
        ([(1, 100.9), (-15, 100.2)], 1),  # stopped while it was ending
        ([(1, 100.2, True), (1, 100.9)], 1),  # rank 0 was the first to write, of what followed
        ([(1, 100.2, True), (-15, None)], 0),
        ([(-15, None), (-15, None)], 0),
    ],
)
def test_the_first_failure_is_told_from_those_it_caused(tmp_path, ends, first):
    failures = {rank: failure(tmp_path, rank, *end) for rank, end in enumerate(ends)}
    rank, found = first_failure(failures)
    assert rank == first
    code, time_s = ends[first][:2]
    assert exit_code(found) == (code if code > 0 else 1 if time_s else 128 - code)
    assert f"rank {first} of 9" in describe(rank, found, 9, tmp_path)


def test_torch_by_itself_would_name_the_wrong_rank(tmp_path):
    """The control: torch counts whole seconds."""
    failures = {rank: failure(tmp_path, rank, 1, time_s) for rank, time_s in enumerate((100.9, 100.2))}
    assert ChildFailedError("script", failures).get_first_failure()[0] == 0


# Restarting


def test_the_rank_that_ended_an_attempt_is_named(tmp_path, monkeypatch):
    """Torch's agent names the first that it saw; what the ranks wrote tells causes from consequences."""
    monkeypatch.setenv(FIRST_RANK, "4")

    def said(nnodes: int, nproc: int, record: tuple[int, int, int] | None, *wrote: tuple[int, bool]) -> str:
        config = LaunchConfig(nproc_per_node=nproc, nnodes=nnodes, master_addr="localhost")
        attempts = Attempts(tmp_path, SimpleNamespace(ranks={0: 4, 1: 5}), None, config)
        for rank, lost in wrote:
            failure(tmp_path, rank, 1, 100.0 + rank, lost)
        attempts._error_files = {rank: str(tmp_path / f"{rank}.json") for rank in range(nproc)}
        attempts.record.failed = record
        found = attempts._who_failed()
        for rank, _ in wrote:
            (tmp_path / f"{rank}.json").unlink()
        return found

    assert said(1, 2, (1, 77, -9)) == "rank 5 was killed by signal 9 (SIGKILL)"
    assert said(1, 2, (1, 77, -9), (0, True)) == "rank 5 was killed by signal 9 (SIGKILL)"
    assert said(3, 2, (0, 77, 1), (0, True), (1, False)) == "rank 5 ended with exit code 1: E: 1"
    assert said(3, 2, (0, 77, 1), (0, True), (1, True)) == "a process on another host failed"
    assert said(3, 2, None) == "a process on another host failed"
    assert said(3, 2, (0, 77, 1), (0, True)) == "a process failed"  # rank 5 may have been killed, or stopped


def test_restarts_until_it_works(script, tmp_path, capfd):
    path = script(
        "say(f'try{attempt}')\nwait(f'try{attempt}', 2)\nif attempt < 2 and rank == 1: os._exit(9)\nprint('ok')"
    )
    assert launch_distributed_training(path, nproc_per_node=2, max_restarts=3) == 0
    assert [len(said(tmp_path, f"try{attempt}")) for attempt in range(4)] == [2, 2, 2, 0]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines())[-2:] == ["[rank 0] ok", "[rank 1] ok"]
    for restart in (1, 2):
        assert f"exogym: rank 1 ended with exit code 9; starting again (restart {restart} of 3)\n" in err
    assert "restart 3" not in err and "failed (exitcode" not in err  # torch's own line says no more


def test_restarts_end(script, tmp_path):
    path = script("say('try')\nsys.exit(attempt + 10)")
    assert launch_distributed_training(path, max_restarts=1) == 11
    assert len(said(tmp_path, "try")) == 2


# Being interrupted


GENTLE = """
    def stop(number, frame):
        say("stopped")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    say("up")
    while True:
        time.sleep(0.01)
"""


def when_up(folder: Path, count: int, number: signal.Signals, name: str = "up") -> None:
    """Send this process a signal as soon as `count` ranks have said `name`."""

    def send() -> None:
        said(folder, name, count)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def test_ctrl_c_passes_sigterm_on_and_leaves_nothing(script, tmp_path):
    path = script(GENTLE)
    when_up(tmp_path, 2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_training(path, nproc_per_node=2)
    pids = said(tmp_path, "up")
    assert ended(*pids) and sorted(said(tmp_path, "stopped")) == sorted(pids)


def test_the_next_launcher_removes_the_folder_of_a_killed_one(script, start, tmp_path, monkeypatch):
    """Also while other launchers run, whose folders stay."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    killed = start("-m", "exogym.launch", script("say('up')\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(99)"))
    assert killed.wait() == -signal.SIGKILL and ended(*said(tmp_path, "up", 1))
    (left,) = (tmp_path / "tmp").glob("exogym-launch-*")
    alive = start("-m", "exogym.launch", script("say('alive')\nwait('done', 1)", "alive.py"))
    said(tmp_path, "alive", 1)
    assert not left.exists()
    (other,) = (tmp_path / "tmp").glob("exogym-launch-*")
    assert launch_distributed_training(script("", "short.py")) == 0
    assert [*(tmp_path / "tmp").glob("exogym-launch-*")] == [other]
    (tmp_path / "done.1").touch()
    assert alive.wait() == 0
    assert not other.exists()


def test_an_interrupted_removal_is_finished_by_the_next_launch(tmp_path, monkeypatch):
    killed = """
        import os, shutil
        from exogym.machines.launch.folders import launch_folder
        remove = shutil.rmtree
        with launch_folder() as folder:
            (folder / "0.err").touch()
            shutil.rmtree = lambda *path, **options: (remove(*path, **options), os._exit(9))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(killed)], env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 9
    assert [*tmp_path.glob(f"{PREFIX}*/{OWNER}")] and not [*tmp_path.glob(f"{PREFIX}*/running")]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with launch_folder() as folder:
        assert [*tmp_path.iterdir()] == [folder]
    assert not [*tmp_path.iterdir()]


def test_only_folders_of_dead_launchers_of_this_user_count_as_left(tmp_path, monkeypatch):
    folder = tmp_path / f"{PREFIX}x"
    (folder / "running").mkdir(parents=True)
    assert not is_left(folder)  # a launcher has just made it
    ours = described()
    dead = ours | {"started": "1"}  # another process had this number
    for owner, left in (
        (dead, True),
        (ours, False),
        (dead | {"machine": "another"}, False),
        (dead | {"machine": "another", "boot": "another"}, False),
        ([], False),
        ({"machine": ours["machine"], "pid": "x"}, False),
    ):
        (folder / OWNER).write_text(json.dumps(owner))
        assert is_left(folder) == left, owner
    (folder / OWNER).write_text(json.dumps(dead))
    (folder / "running" / str(os.getpid())).touch()
    assert not is_left(folder)  # a rank still runs
    (folder / "running" / str(os.getpid())).unlink()
    (tmp_path / "link").symlink_to(folder)
    assert is_left(folder) and not is_left(tmp_path / "link")
    (folder / "running").rmdir()
    assert is_left(folder)  # its launcher was killed while it removed the folder
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert not is_left(folder)


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(script, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "86400")  # torch by itself would wait for a day
    path = script("signal.signal(signal.SIGTERM, lambda *_: say('deaf'))\nsay('up')\nwhile True: time.sleep(0.01)")
    when_up(tmp_path, 2, signal.SIGINT)
    when_up(tmp_path, 2, signal.SIGINT, name="deaf")
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_training(path, nproc_per_node=2)
    assert ended(*said(tmp_path, "up", 2))


def test_sigterm_reaches_the_caller_when_all_is_over(script, tmp_path):
    path, got = script(GENTLE), []
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: got.append([runs(pid) for pid in said(tmp_path, "up")])
    )
    try:
        when_up(tmp_path, 2, signal.SIGTERM)
        assert launch_distributed_training(path, nproc_per_node=2) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [[False, False]]
    assert len(said(tmp_path, "stopped")) == 2


def test_the_command_ends_as_it_was_told(script, start, tmp_path):
    path = script(GENTLE)
    ends = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
    started = {}
    for number in ends:
        folder = tmp_path / number.name
        folder.mkdir()
        (folder / "script.py").write_text(path.read_text())
        own = os.environ | {"TMPDIR": str(tmp_path)}  # a launcher that is killed cannot tidy up
        started[number] = start("-m", "exogym.launch", "--nproc-per-node", 2, folder / "script.py", env=own)
    for number, code in ends.items():
        pids = said(tmp_path / number.name, "up", 2)
        started[number].send_signal(number)
        err = started[number].communicate()[1]
        assert started[number].returncode == code
        assert ended(*pids)  # even after SIGKILL: the kernel tells the ranks
        assert (number == signal.SIGINT) == ("interrupted" in err)
        assert "Traceback" not in err


# Ports and nodes


def test_suites_side_by_side_use_different_ports():
    """And none that the system gives to an outgoing connection before its use."""
    ours, code = {processes.free_port() for _ in range(9)}, "import processes; print(processes.free_port())"
    theirs = {int(processes.python("-c", code).stdout) for _ in range(2)}
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert len(ours) == 9 and not ours & theirs
    outside = first > 10_000 + 50 or last < 65_536 - 100
    assert not outside or not {port for port in ours | theirs if first <= port <= last}


def test_the_port_is_free_afterwards_and_said_to_be_taken(script):
    with socket.socket() as other:
        port = processes.free_port()
        other.bind(("127.0.0.1", port))
        path = script(
            "import socket\nwith socket.socket() as s: sys.exit(s.connect_ex(('127.0.0.1', int(sys.argv[1]))))"
        )
        other.listen()
        with pytest.raises(ArgumentError, match=f"port {port} is taken"):
            launch_distributed_training(path, port, master_port=port)
    assert launch_distributed_training(path, port, master_port=port) == 0  # somebody listened while it ran
    assert free(port)


def test_two_nodes_in_the_order_of_their_ranks(script, start, capfd):
    """Node 1 has one process and comes first; one failure restarts both nodes."""
    path = script(
        """
        say(f"try{attempt}")
        wait(f"try{attempt}", 3)
        if attempt == 0:
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        print(os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["MASTER_ADDR"])
        """
    )
    options = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": processes.free_port(), "max_restarts": 1}
    words = [f"--{name}={value}" for name, value in options.items()]
    other = start("-m", "exogym.launch", *words, "--node_rank=1", path)
    assert launch_distributed_training(path, nproc_per_node=2, **options) == 0
    out, err = other.communicate()
    assert out == "[rank 2] 3 0 1 127.0.0.1\n" and other.returncode == 0
    assert "exogym: rank 2 was killed by signal 9 (SIGKILL); starting again (restart 1 of 1)\n" in err
    here = capfd.readouterr()
    assert "exogym: a process on another host failed; starting again (restart 1 of 1)\n" in here.err
    assert "was killed" not in here.err and "failed (exitcode" not in err + here.err
    assert sorted(here.out.splitlines()) == ["[rank 0] 3 0 0 127.0.0.1", "[rank 1] 3 1 0 127.0.0.1"]
    assert free(options["master_port"])


def test_nodes_that_do_not_meet(script):
    path = script("")
    options = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": processes.free_port(), "start_timeout": 1}
    for rank in (0, 1):
        with pytest.raises(TrainingError, match=f"not all nnodes=2 machines met at 127.0.0.1.*this is machine {rank}"):
            launch_distributed_training(path, node_rank=rank, **options)
    with pytest.raises(ArgumentError, match="is unknown on this network"):
        check_address("no.such.host.invalid")


def test_two_nodes_of_one_rank():
    """All three nodes learn of it, and nobody waits for a node that cannot come."""
    port, errors = processes.free_port(), []
    register()

    def meet(rank: int) -> None:
        node = Machine(rank, "127.0.0.1", port, 120)
        parameters = RendezvousParameters(NAME, f"127.0.0.1:{port}", "run", 3, 3, "127.0.0.1", node=node)
        handler = get_rendezvous_handler(parameters)
        try:
            handler.next_rendezvous()
        except (ArgumentError, RuntimeError) as error:
            errors.append(str(error))
        handler.shutdown()

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert errors == ["the 3 machines have node_rank=0, 1, 1: use each of 0 to 2 once"] * 3


# What is printed


def test_logs_hold_what_each_rank_printed(script, tmp_path):
    path = script("print('out', rank)\nprint('err', rank, file=sys.stderr)")
    logs = tmp_path / "deep" / "logs"
    for _ in range(2):
        assert launch_distributed_training(path, nproc_per_node=2, log_dir=logs) == 0
    assert sorted(p.name for p in logs.iterdir()) == ["training_rank_0.log", "training_rank_1.log"]
    for rank in range(2):
        lines = (logs / f"training_rank_{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err {rank}"] * 2 + [f"out {rank}"] * 2  # appended to


def test_no_file_is_written_unasked(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = script("print('x')")
    assert launch_distributed_training(path) == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_that_cannot_be_written_stops_nothing(script, tmp_path, capfd):
    (tmp_path / "training_rank_0.log").mkdir()
    assert launch_distributed_training(script("print('x')"), log_dir=tmp_path) == 0
    out, err = capfd.readouterr()
    assert out == "[rank 0] x\n"
    assert "training_rank_0.log is no longer written" in err


class Broken:
    """A terminal that went away."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        pass


def pass_through(tmp_path, pieces: list[bytes]) -> None:
    """Let rank 5 print `pieces`, one write each."""
    output = RankOutput(tmp_path, 1, None)
    output.ranks[0] = 5
    with open(tmp_path / "0.out", "wb", buffering=0) as pipe:
        for piece in pieces:
            pipe.write(piece)
            time.sleep(0.01)
    output.close()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"no end"], ["no end"]),
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"10%\r20%\r", b"30%\r", b"done\n"], ["10%", "20%", "30%", "done"]),
        (["ü".encode()[:1], "ü".encode()[1:] + b"\n"], ["ü"]),
        ([b"\xff\n"], ["\ufffd"]),
        ([b"x" * 200_000 + b"\n"], ["x" * 200_000]),
    ],
)
def test_lines_are_cut_where_they_end(tmp_path, capsys, pieces, lines):
    pass_through(tmp_path, pieces)
    assert capsys.readouterr().out == "".join(f"[rank 5] {line}\n" for line in lines)


def test_a_terminal_that_goes_away_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken())
    pass_through(tmp_path, [b"a\n", b"b" * 500_000, b"\n"])


# The command line and bad input


def test_options_stand_before_or_after_the_script():
    after = split(["train.py", "--nproc_per_node=4", "--backend=gloo", "--model", "small", "-x", "--", "--nnodes", "2"])
    assert after == (
        ["--nproc_per_node=4", "--backend=gloo"],
        "train.py",
        False,
        ["--model", "small", "-x", "--nnodes", "2"],
    )
    before = split(["--nproc-per-node", "4", "train.py", "--model", "small", "--log-dir", "x"])
    assert before == (["--nproc-per-node", "4", "--log-dir", "x"], "train.py", False, ["--model", "small"])
    assert split(["--nnodes=1", "-m", "a.b", "-m", "c", "--help"]) == (
        ["--nnodes=1"],
        "a.b",
        True,
        ["-m", "c", "--help"],
    )
    assert split(["--", "-odd.py", "--nnodes"]) == ([], "-odd.py", False, ["--nnodes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc 2 train.py", "unknown option --nproc: did you mean '--nproc_per_node'?"),
        ("train.py --nproc_per_nodes=2", "resembles --nproc_per_node"),
        ("--nproc_per_node=x train.py", "invalid int value: 'x'"),
        ("--nproc_per_node=0 train.py", "nproc_per_node=0 must be a whole number of at least 1"),
        ("train.py --backend", "expected one argument"),
        ("--nnodes 1", "no script"),
        ("-m", "no script"),
        ("no/such/train.py", "script='no/such/train.py' does not exist"),
        ("--backend mpi train.py", "mpi"),
        ("--backend glou train.py", "did you mean 'gloo'?"),
        ("--log_dir /dev/null/x " + __file__, "log_dir='/dev/null/x' cannot be created"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, words, message):
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and message in err


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--nproc-per-node" in shown and "--max_restarts" in shown and "MASTER_ADDR" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc_node": 2}, "LaunchConfig() has no argument 'nproc_node': did you mean 'nproc_per_node'?"),
        ({"nproc_per_node": True}, "nproc_per_node=True must be a whole number"),
        ({"nnodes": 2}, "nnodes=2 needs master_addr="),
        ({"node_rank": 1}, "node_rank=1 is too large for nnodes=1"),
        ({"master_port": 70000}, "master_port=70000 must be a port"),
        ({"master_addr": " "}, "master_addr=' ' must be"),
        ({"max_restarts": -1}, "max_restarts=-1 must be"),
        ({"monitor_interval": 0}, "monitor_interval=0 must be"),
        ({"start_timeout": 0.5}, "start_timeout=0.5 must be"),
        ({"log_dir": 3}, "log_dir=3 must be"),
        ({"backend": "mpi"}, "mpi"),
    ],
)
def test_a_config_is_checked_when_it_is_made(options, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        LaunchConfig(**options)


def test_arguments_of_the_functions():
    with pytest.raises(ArgumentError, match="did you mean 'nproc_per_node'"):
        launch_distributed_training("x.py", nproc_per_nodes=2)
    with pytest.raises(ArgumentError, match="needs a LaunchConfig, not a dict"):
        DistributedLauncher({"nproc_per_node": 2})
    assert LaunchConfig(master_addr="::1", nnodes=2).endpoint == "[::1]:29500"


# The page


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path):
    """Each Python block of the page that begins with `# name.py` is a script; all lines of its sh blocks run at once.

    So launches side by side do not disturb each other.
    """
    for block in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    lines = [
        line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines() if line[:1] not in ("", "#")
    ]
    assert len(lines) > 3 and sum("--nnodes=2" in line for line in lines) == 2
    for_nodes, started = str(processes.free_port()), []
    for number, line in enumerate(lines):
        port = for_nodes if "--nnodes=2" in line else str(processes.free_port())
        python, *words = shlex.split(line.replace("192.168.1.100", "127.0.0.1").replace("29500", port))
        assert python == "python"
        with open(tmp_path / f"said{number}", "w") as file:
            started.append(processes.start(words, tmp_path, files=(None, file.fileno(), file.fileno())))
    for number, (line, pid) in enumerate(zip(lines, started, strict=True)):
        status, text = os.waitpid(pid, 0)[1], (tmp_path / f"said{number}").read_text()
        assert status == 0, (line, text[-2000:])
        assert "train.py" not in line or "node_rank=1" in line or " processes" in text
