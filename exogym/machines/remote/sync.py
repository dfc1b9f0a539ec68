"""Copy the project to the hosts with rsync over ssh."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

from exogym.errors import ArgumentError, ExoGymError
from exogym.machines.remote import ssh
from exogym.machines.remote.hosts import Host, HostsConfig
from exogym.machines.remote.inquiry import ask

EXCLUDED = (
    *(".git", ".venv", "venv", "runs", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
    *("*.egg-info", ".ipynb_checkpoints", ".DS_Store"),
    *(f"step_{'[0-9]' * 10}*/", ".step_*.tmp/"),  # checkpoints: each host's own stay apart
)

STATUSES = {  # rsync's exit statuses whose cause rsync doesn't report
    5: "the two rsyncs could not start; does the login on the host print text?",
    11: "a file could not be read or written, usually because the host's disk is full",
    12: "the connection ended early: rsync is missing on the host or was killed, the disk is full, or the login "
    "prints text",
    23: "some files were not copied: usually files that cannot be read here or written on the host",
    127: "the host has no rsync: install it",
    255: "ssh could not connect, or lost the connection",
}


def copies(host: Host, project: str) -> bool:
    """Return whether the project must be copied to `host`: not if the host uses this machine's own folder."""
    return not (host.is_local and os.path.realpath(os.path.expanduser(host.path or project)) == project)


def sync_words(host: Host, project: str) -> list[str]:
    """Return the rsync command that copies the project's folder to `host`. The command deletes no files on the host.

    >>> sync_words(Host("10.0.0.2", "10.0.0.2", path="~/whisper"), "/home/ann/whisper")[-3:]
    ['--', '/home/ann/whisper/', '10.0.0.2:whisper/']
    """
    words = ["rsync", "--archive", "--compress", "--secluded-args"]
    words += [f"--exclude={name}" for name in EXCLUDED]
    target = (host.path or project).rstrip("/") + "/"
    if host.is_local:
        return [*words, "--", f"{project}/", os.path.expanduser(target)]
    name = f"[{host.ssh_host}]" if ":" in host.ssh_host else host.ssh_host
    there = target.removeprefix("~/") or "./"  # commands over ssh start in the home folder
    return [*words, "--rsh", ssh.remote_shell(host), "--", f"{project}/", f"{name}:{there}"]


def sync_project(config: HostsConfig, project: str) -> None:
    """Copy the project's folder to all hosts that don't use this machine's own folder.

    Raises:
        ArgumentError: this machine has no rsync.
        ExoGymError: a copy failed. The message says where and why.
    """
    hosts = [host for host in config.hosts if copies(host, project)]
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        list(pool.map(lambda host: _copy(host, project), hosts))


def _copy(host: Host, project: str) -> None:
    made = ask(host, "make", folder=host.path or project)
    if "error" in made:
        raise ExoGymError(f"{host.address}: the project's folder cannot be created: {made['error']}")
    try:
        done = subprocess.run(
            sync_words(host, project), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ArgumentError("this machine has no rsync: install it, or copy the project in another way") from None
    if done.returncode:
        raise ExoGymError(f"{host.address}: {failure(done.returncode, done.stderr)}")


def failure(status: int, said: str) -> str:
    """Return a text with rsync's exit status, the usual cause, and rsync's own message `said`.

    >>> failure(11, "")
    "rsync ended with status 11: a file could not be read or written, usually because the host's disk is full"
    """
    meaning = "killed by a signal" if status < 0 else STATUSES.get(status, "see this status in man rsync")
    said = said.strip()
    return f"rsync ended with status {status}: {meaning}" + (f". Its message: {said}" if said else "")
