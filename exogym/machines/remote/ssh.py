"""Run Python on a host through the system's ssh client, or on this machine without ssh.

The host's login shell only gets one fixed line with the quoted path of the host's Python. A program from
`exogym/machines/remote/onhost` and its arguments follow on stdin as JSON, which no shell reads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError, ExoGymError
from exogym.machines.remote.hosts import Host

CONNECT_TIMEOUT_S = 10
ALIVE_S, ALIVE_COUNT = 15, 4  # a minute of silence ends a connection
SSH_FAILED = 255
OPTIONS = {
    "BatchMode": "yes",  # never ask for a password, or about an unknown host
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(ALIVE_S),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}
# Reads [loader, modules, arguments] and runs the loader. It has no quote, $ or backslash that a shell could interpret.
BOOT = "import sys,json;i=sys.stdin.buffer;d=json.loads(i.read(int(i.readline())));exec(d[0])"
LOADER = """
import types
for name, text in d[1]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, name, "exec"), module.__dict__)
sys.exit(module.main(d[2], i))
"""
FOLDER = Path(__file__).with_name("onhost")
NEEDS = {
    "guard": ("interfaces", "health", "guard"),
    "probe": ("interfaces", "probe"),
}


def command(host: Host, words: Sequence[str]) -> list[str]:
    """Return the command with which this machine runs the command `words` on `host`.

    ssh sends the command as one string, which the host's login shell splits, so each word is quoted.

    >>> host = Host("10.0.0.2", "10.0.0.2", user="ann")
    >>> command(host, ["echo", "$(date); it's"])[-5:]
    ['-l', 'ann', '--', '10.0.0.2', 'echo \\'$(date); it\\'"\\'"\\'s\\'']
    """
    for word in words:
        if "\0" in word:
            raise ArgumentError(f"{word!r} contains a zero byte, which commands cannot contain: remove it")
    if host.is_local:
        return list(words)
    return [*client(host), "--", host.ssh_host, shlex.join(words)]


def client(host: Host) -> list[str]:
    """Return the start of an ssh command for `host`: ssh and its options, without the host's name.

    ssh uses the user's config, agent, known hosts and jump hosts, and always checks host keys, as strictly as the
    user's config says.

    Raises:
        ArgumentError: this machine has no ssh client.
    """
    words = ["ssh", *identity(host)]
    for name, value in OPTIONS.items():
        words += ["-o", f"{name}={value}"]
    if not _checks_host_keys(host):
        words += ["-o", "StrictHostKeyChecking=yes"]
    return words if host.user is None else [*words, "-l", host.user]


def identity(host: Host) -> list[str]:
    """Return ssh's options for the config file, key file and port of `host`."""
    words = [] if host.ssh_config is None else ["-F", host.ssh_config]
    words += [] if host.key is None else ["-i", host.key]
    return words if host.port is None else [*words, "-p", str(host.port)]


@functools.lru_cache(maxsize=1024)
def _checks_host_keys(host: Host) -> bool:
    """Return whether the user's config checks this host's key."""
    asked = ["ssh", *identity(host), "-G", "--", host.ssh_host]
    try:
        said = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ArgumentError("this machine has no ssh: install the OpenSSH client") from None
    settings = dict(line.lower().partition(" ")[::2] for line in said.stdout.splitlines())
    return settings.get("stricthostkeychecking") in ("true", "yes", "ask", "accept-new")


def python_words(host: Host) -> list[str]:
    """Return the command with which the host's Python runs the program that `start` sends."""
    python = host.interpreter
    if python.startswith("~/"):  # quoted, so that no shell expands ~; commands over ssh start in the home folder
        python = os.path.expanduser(python) if host.is_local else f"./{python[2:]}"
    return [python, "-u", "-c", BOOT]


def start(host: Host, program: str, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a program of the folder `onhost` on `host`, and return the process that runs it (ssh, or Python here).

    The program reads everything that is later written to the process's stdin. The process has its own session, so
    Ctrl-C in the terminal doesn't end it.

    Raises:
        ExoGymError: ssh, or this machine's Python, cannot be started.
    """
    modules = [
        (f"exogym.machines.remote.onhost.{name}", (FOLDER / f"{name}.py").read_text("utf-8")) for name in NEEDS[program]
    ]
    sent = json.dumps([LOADER, modules, given]).encode()
    words = command(host, python_words(host))
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise ExoGymError(f"{words[0]} cannot be started: {error}") from None
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its exit status says why it ended
        process.stdin.write(b"%d\n" % len(sent) + sent)
        process.stdin.flush()
    return process


def remote_shell(host: Host) -> str:
    """Return the start of an ssh command for `host` as one text, quoted for rsync's option `--rsh`. See `client`.

    >>> remote_shell(Host("h", "h", user="ann"))[-15:]
    "'-l' 'ann' '--'"
    """
    return " ".join("'" + word.replace("'", "''") + "'" for word in [*client(host), "--"])
