"""Runs Python on a host, through the system's own ssh client; on this machine without it.

What goes through the host's login shell is one fixed line and the path of its Python, quoted. The program to run, from
`exogym/machines/remote/onhost`, and its arguments follow on stdin as JSON, which no shell sees.
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
ALIVE_S, ALIVE_COUNT = 15, 4  # silence of a minute ends a connection
SSH_FAILED = 255
OPTIONS = {
    "BatchMode": "yes",  # never asks: a password, or whether to trust an unknown host
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(ALIVE_S),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}
# Reads [loader, modules, arguments] and runs the loader. No quote, no $, no backslash: nothing that a shell could want.
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
    """Return the words that this machine runs to have `words` run on `host`.

    ssh hands the host one text, which its login shell splits again, so each word is quoted.

    >>> host = Host("10.0.0.2", "10.0.0.2", user="ann")
    >>> command(host, ["echo", "$(date); it's"])[-5:]
    ['-l', 'ann', '--', '10.0.0.2', 'echo \\'$(date); it\\'"\\'"\\'s\\'']
    """
    for word in words:
        if "\0" in word:
            raise ArgumentError(f"{word!r} holds a zero byte, which no command can take: leave it out")
    if host.is_local:
        return list(words)
    return [*client(host), "--", host.ssh_host, shlex.join(words)]


def client(host: Host) -> list[str]:
    """Return ssh with its options for `host`, up to the host's name.

    The user's own config, agent, known hosts and jump hosts apply. Host keys are checked as it says, but never not at
    all.

    Raises:
        ArgumentError: there is no ssh client here.
    """
    words = ["ssh", *identity(host)]
    for name, value in OPTIONS.items():
        words += ["-o", f"{name}={value}"]
    if not _checks_host_keys(host):
        words += ["-o", "StrictHostKeyChecking=yes"]
    return words if host.user is None else [*words, "-l", host.user]


def identity(host: Host) -> list[str]:
    """Return the options that say which config, key and port."""
    words = [] if host.ssh_config is None else ["-F", host.ssh_config]
    words += [] if host.key is None else ["-i", host.key]
    return words if host.port is None else [*words, "-p", str(host.port)]


@functools.lru_cache(maxsize=1024)
def _checks_host_keys(host: Host) -> bool:
    """Say whether the user's config leaves the check of this host's key on."""
    asked = ["ssh", *identity(host), "-G", "--", host.ssh_host]
    try:
        said = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ArgumentError("there is no ssh on this machine: install the OpenSSH client") from None
    settings = dict(line.lower().partition(" ")[::2] for line in said.stdout.splitlines())
    return settings.get("stricthostkeychecking") in ("true", "yes", "ask", "accept-new")


def python_words(host: Host) -> list[str]:
    """Return the words that start a program sent by `start`."""
    python = host.interpreter
    if python.startswith("~/"):  # quoted, so no shell puts the home folder in; ssh's commands start there
        python = os.path.expanduser(python) if host.is_local else f"./{python[2:]}"
    return [python, "-u", "-c", BOOT]


def shown(host: Host) -> str:
    """Return the command that `start` runs, as one line."""
    return shlex.join(command(host, python_words(host)))


def start(host: Host, program: str, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a program of `onhost` on `host`; its stdin then belongs to the program.

    It has its own session, so that Ctrl-C in the terminal reaches this process only.

    Raises:
        ExoGymError: the Python of this machine cannot be started.
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
    with contextlib.suppress(BrokenPipeError):  # why it ended says its status
        process.stdin.write(b"%d\n" % len(sent) + sent)
        process.stdin.flush()
    return process


def remote_shell(host: Host) -> str:
    """Return ssh with its options as one text for rsync, which splits it at spaces outside quotes; no shell reads it.

    >>> remote_shell(Host("h", "h", user="ann"))[-15:]
    "'-l' 'ann' '--'"
    """
    return " ".join("'" + word.replace("'", "''") + "'" for word in [*client(host), "--"])
