"""Ask a host questions, and find the cause if the host does not answer."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import threading
from typing import Any

from exogym.errors import ExoGymError
from exogym.machines.remote import ssh
from exogym.machines.remote.hosts import Host
from exogym.machines.remote.onhost.probe import MARK

ANSWER_S = 60.0
NOT_THERE, NOT_A_PROGRAM = 127, 126  # exit statuses of a shell
MOST_BYTES, MOST_ERRORS = 1 << 24, 1 << 16  # limits for an answer and for stderr


class Unanswered(Exception):
    """A host doesn't answer. `Inquiry.diagnosis` returns the cause."""


class Inquiry:
    """Start the program `onhost/probe.py` on a host, and ask it questions about the host.

    Args:
        host: the host to ask.
        answer_s: seconds to wait for each answer. None: no limit, so only ssh detects a lost host.
    """

    def __init__(self, host: Host, answer_s: float | None = ANSWER_S):
        self.host, self.answer_s = host, answer_s
        self.process = ssh.start(host, "probe", {})
        self.answered = self.late = False
        self._errors = b""
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def ask(self, question: str, **given: Any) -> Any:
        """Send a question and return the host's answer, or {"error": text} if an error occurred on the host.

        Raises:
            Unanswered: the connection is gone, or the answer is late, too long or invalid.
        """
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        timer = None if self.answer_s is None else threading.Timer(self.answer_s, self._give_up)
        if timer is not None:
            timer.start()
        left = MOST_BYTES
        try:
            process.stdin.write(json.dumps({"ask": question} | given).encode() + b"\n")
            process.stdin.flush()
            while left > 0 and (line := process.stdout.readline(left)):
                left -= len(line)
                if line.startswith(MARK.encode()):  # not a login script's output
                    self.answered = True
                    return json.loads(line[len(MARK) :])
        except (OSError, ValueError, RecursionError):
            pass
        finally:
            if timer is not None:
                timer.cancel()
        raise Unanswered

    def _give_up(self) -> None:
        self.late = True
        self.process.kill()

    def _read_errors(self) -> None:
        stream = self.process.stderr
        assert stream is not None
        self._errors = stream.read(MOST_ERRORS)
        while stream.read(MOST_ERRORS):
            pass

    def end(self, wait_s: float | None = None) -> None:
        """End the connection to the host. Cut it if it is still open after `wait_s` seconds (default: `answer_s`)."""
        process = self.process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(self.answer_s if wait_s is None else wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        process.stdout.close()
        process.stderr.close()

    def diagnosis(self) -> tuple[str, str, str]:
        """Return why the host didn't answer: the failed check, its finding and the remedy."""
        said = _last(self._errors.decode("utf-8", "replace"))
        if self.late:
            return "reachable", f"no answer within {self.answer_s:g} s", "check the host's load and its network"
        if self.answered:
            return "connection", f"lost: {said}", "check the network and the host's own log"
        status = self.process.returncode
        if status == ssh.SSH_FAILED and not self.host.is_local:
            return diagnose(self.host, self._errors.decode("utf-8", "replace"))
        python = self.host.interpreter
        if status in (NOT_THERE, NOT_A_PROGRAM):
            return "python", f"{python}: {said}", _PYTHON
        return "python", f"{python} ended with status {status}: {said}", _PYTHON


def ask(host: Host, question: str, **given: Any) -> Any:
    """Ask a host one question, over a new connection, and return the answer of `onhost/probe.py`.

    Raises:
        ExoGymError: the host didn't answer. The message says what to do.
    """
    inquiry, answer = Inquiry(host), None
    with contextlib.suppress(Unanswered):
        answer = inquiry.ask(question, **given)
    inquiry.end()
    if answer is None:
        check, seen, remedy = inquiry.diagnosis()
        raise ExoGymError(f"{host.address}: {check}: {seen}. Remedy: {remedy}")
    return answer


_PYTHON = "set python_env, or the host's own field python, to a Python 3.11 or later on the host"
# ssh's message in lower case; the failed check; the remedy.
_SIGNS = (
    (
        "identification has changed",
        "host key",
        "only if you reinstalled the host: ssh-keygen -R {name}; then run {by_hand} once and compare the fingerprint",
    ),
    (
        "host key verification failed",
        "host key",
        "run {by_hand} once, compare the fingerprint with the output of ssh-keygen -lf on the host, and accept it",
    ),
    (
        "permission denied",
        "login",
        "allow the key on the host: ssh-copy-id -i KEY {target}; or name another key in ssh_key_path, or another user "
        "in ssh_user. {by_hand} must work without a question",
    ),
    ("could not resolve", "reachable", "use its IP address, or put its name for ssh into ssh_host"),
    (
        "connection refused",
        "reachable",
        "start the ssh server there (macOS: Settings, Sharing, Remote Login; Debian: apt-get install "
        "openssh-server), or set its port in ssh_port",
    ),
    ("", "reachable", "check that the host is on and in this network: {by_hand}"),
)


def diagnose(host: Host, errors: str) -> tuple[str, str, str]:
    """Return why ssh could not connect to `host`: the failed check, ssh's message and the remedy.

    Args:
        errors: ssh's output on stderr.

    >>> diagnose(Host("h", "h"), "ssh: connect to host h port 22: Connection refused")[:2]
    ('reachable', 'ssh: connect to host h port 22: Connection refused')
    """
    said = errors.lower()
    user = [] if host.user is None else ["-l", host.user]
    by_hand = shlex.join(["ssh", *ssh.identity(host), *user, host.ssh_host])
    target = host.ssh_host if host.user is None else f"{host.user}@{host.ssh_host}"
    name = host.ssh_host if host.port is None else f"'[{host.ssh_host}]:{host.port}'"
    check, remedy = next((check, remedy) for sign, check, remedy in _SIGNS if sign in said)
    return check, _last(errors), remedy.format(by_hand=by_hand, target=target, name=name)


def _last(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
