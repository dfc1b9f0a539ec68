"""Copies the project to the hosts with rsync over ssh."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

from exogym.errors import ArgumentError, ExoGymError
from exogym.remote import ssh
from exogym.remote.hosts import Host, HostsConfig
from exogym.remote.session import Session, Unanswered

EXCLUDED = (
    *(".git", ".venv", "venv", "runs", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
    *("*.egg-info", ".ipynb_checkpoints", ".DS_Store"),
    *(f"step_{'[0-9]' * 10}*/", ".step_*.tmp/"),  # checkpoints: each host's own stay apart
)


def copies(host: Host, project: str) -> bool:
    """Say whether the project must be copied to `host`: not to the folder in which it is."""
    return not (host.is_local and os.path.realpath(os.path.expanduser(host.path or project)) == project)


def sync_words(host: Host, project: str) -> list[str]:
    """Return the rsync command that copies the project's folder to `host`; nothing there is deleted.

    >>> sync_words(Host("10.0.0.2", "10.0.0.2", path="~/whisper"), "/home/ann/whisper")[-3:]
    ['--', '/home/ann/whisper/', '10.0.0.2:whisper/']
    """
    words = ["rsync", "--archive", "--compress", "--secluded-args"]
    words += [f"--exclude={name}" for name in EXCLUDED]
    target = (host.path or project).rstrip("/") + "/"
    if host.is_local:
        return [*words, "--", f"{project}/", os.path.expanduser(target)]
    name = f"[{host.ssh_host}]" if ":" in host.ssh_host else host.ssh_host
    there = target.removeprefix("~/") or "./"  # ssh's commands start in the home folder
    return [*words, "--rsh", ssh.remote_shell(host), "--", f"{project}/", f"{name}:{there}"]


def sync_project(config: HostsConfig, project: str, answer_s: float) -> None:
    """Copy the project's folder to all hosts that have it elsewhere.

    Raises:
        ArgumentError: there is no rsync here.
        ExoGymError: a copy failed; the message says where and why.
    """
    hosts = [host for host in config.hosts if copies(host, project)]
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        list(pool.map(lambda host: _copy(host, project, answer_s), hosts))


def _copy(host: Host, project: str, answer_s: float) -> None:
    session = Session(host, answer_s)
    try:
        made = session.ask("make", folder=host.path or project)
    except Unanswered:
        session.end()
        raise ExoGymError(f"{host.address}: {': '.join(session.diagnosis())}") from None
    session.end()
    if "error" in made:
        raise ExoGymError(f"{host.address}: the project's folder cannot be made: {made['error']}")
    try:
        done = subprocess.run(
            sync_words(host, project), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ArgumentError(
            "there is no rsync on this machine: install it, or copy the project by other means"
        ) from None
    if done.returncode:
        raise ExoGymError(f"{host.address}: rsync ended with status {done.returncode}: {done.stderr.strip()}")
