"""The SSH files that pairing uses: this computer's key pair and `known_hosts`, and the agent's `authorized_keys`."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from exogym.errors import ArgumentError, ExoGymError
from exogym.files import replacing, temporary_folder
from exogym.machines.remote import ssh
from exogym.remote import Host

AUTHORIZED_KEYS = "~/.ssh/authorized_keys"
KINDS = (
    *("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa"),
    *("sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"),
)
MOST_KEY = 4096  # characters of a public key
NAMESPACE = "exogym-pairing"  # of signatures, so that a signature for another purpose proves nothing here
OURS = re.compile(r"[ \t]exogym:[A-Za-z0-9._-]+$")  # the end of each line that pairing wrote into `authorized_keys`
SCAN_S = 5
NO_SSHD = (
    "no SSH server answers at {address} port {port} of this computer: start one (Debian: apt-get install "
    "openssh-server; macOS: Settings, Sharing, Remote Login), or pass its port as --ssh-port"
)


def public_key(text: object) -> str:
    """Return a public key as "KIND BASE64", without its comment.

    Raises:
        ArgumentError: `text` is not a public key, or it could act as another line or as an option of an SSH file.

    >>> public_key("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA ann@laptop")[:20]
    'ssh-ed25519 AAAAC3Nz'
    """
    words = text.split(" ") if isinstance(text, str) and len(text) <= MOST_KEY else []
    if len(words) >= 2 and words[0] in KINDS and re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", words[1]):
        try:
            blob = base64.b64decode(words[1], validate=True)
        except binascii.Error:
            blob = b""
        size = int.from_bytes(blob[:4], "big")
        if blob[4 : 4 + size] == words[0].encode():
            return f"{words[0]} {words[1]}"
    raise ArgumentError(f"{str(text)[:40]!r} is not a public SSH key: it must look like 'ssh-ed25519 AAAA...'")


def own_key(path: str) -> str:
    """Return the public key of the private key in the file `path`. If the file does not exist, make a new key.

    A new key has no passphrase, so that runs can start without a question. The new key permits logins only to computers
    that were paired with it.

    Raises:
        ArgumentError: the file is not a private key.
        ExoGymError: ssh-keygen fails.
    """
    file = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(file):
        os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "exogym", "-f", file)
    return public_key(_run("ssh-keygen", "-y", "-P", "", "-f", file).strip())


def sign(path: str, statement: str) -> str:
    """Sign `statement` with the private key in the file `path`, and return the signature.

    Raises:
        ExoGymError: ssh-keygen cannot sign with this key.
    """
    with temporary_folder() as folder:
        file = os.path.join(folder, "key")  # ssh-keygen reads the public key beside the private key, if it exists
        os.symlink(os.path.abspath(os.path.expanduser(path)), file)
        Path(f"{file}.pub").write_text(own_key(path) + "\n", "utf-8")
        return _run("ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", file, told=statement)


def signed(key: str, statement: str, signature: object) -> bool:
    """Return whether `signature` signs `statement` and was made with the private key of the public key `key`."""
    if not isinstance(signature, str) or not signature.isascii():
        return False
    with temporary_folder() as folder:
        known, given = os.path.join(folder, "known"), os.path.join(folder, "signature")
        Path(known).write_text(f"caller {key}\n", "ascii")
        Path(given).write_text(signature, "ascii")
        words = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-f", known, "-I", "caller", "-s", given]
        return _run(*words, fails=False, told=statement).startswith("Good ")


def authorize(path: str, key: str, address: str, name: str) -> bool:
    """Let the owner of `key` log in from `address`: add a line to the file `path`, usually `authorized_keys`.

    The line ends in `exogym:NAME`. The line permits login and commands, but no forwarding, tunnel or terminal. It
    replaces the lines that earlier pairings wrote for this key. Other lines do not change. If the user has written a
    line for this key, the file does not change: the user's line decides the key's rights.

    Returns:
        True if the file now has a line from pairing; False if the user's own line permits the key.

    Raises:
        OSError: the file cannot be read or written.
    """
    file = Path(os.path.realpath(os.path.expanduser(path)))
    if not file.parent.exists():
        file.parent.mkdir(mode=0o700, parents=True)
    text = file.read_bytes().decode("utf-8", "surrogateescape") if file.exists() else ""
    lines = text.removesuffix("\n").split("\n") if text else []
    of_key = [line for line in lines if _authorizes(line, key)]
    if any(not OURS.search(line.rstrip()) for line in of_key):
        return False
    own = f'restrict,from="{ipaddress.ip_address(address)}" {key} exogym:{re.sub("[^A-Za-z0-9._-]", "-", name)}'
    text = "\n".join([*(line for line in lines if line not in of_key), own]) + "\n"
    with replacing(file) as out, open(out.fileno(), "wb", closefd=False) as raw:
        os.fchmod(out.fileno(), 0o600)
        raw.write(text.encode("utf-8", "surrogateescape"))
    return True


def _authorizes(line: str, key: str) -> bool:
    """Return whether a line of `authorized_keys`, "[OPTIONS] KIND BASE64 [COMMENT]", is for `key`.

    Quoted options may contain spaces and keys.

    >>> key = "ssh-ed25519 AAAAC3"
    >>> lines = (f'command="echo {key}" {key} ann', f'command="{key}" ssh-rsa AAAA', f"#{key}")
    >>> [_authorizes(line, key) for line in lines]
    [True, False, False]
    """
    line = line.strip()
    words = re.findall(r'(?:"(?:\\"|[^"])*"|[^\s"])+', line)
    at = 0 if words and words[0] in KINDS else 1
    return not line.startswith("#") and words[at : at + 2] == key.split(" ")


def host_keys(address: str, port: int) -> list[str]:
    """Return the host keys of this computer's SSH server at `address`.

    Raises:
        ArgumentError: no SSH server answers.
    """
    found = _run("ssh-keyscan", "-T", str(SCAN_S), "-p", str(port), "--", address, fails=False)
    keys = [line.split(" ", 1)[1] for line in found.splitlines() if line and not line.startswith("#") and " " in line]
    if not keys:
        raise ArgumentError(NO_SSHD.format(address=address, port=port))
    return sorted({public_key(key) for key in keys})


def known_hosts_of(host: Host) -> Path:
    """Return the file in which ssh looks for the host key of `host`, according to the user's SSH config.

    Raises:
        ArgumentError: the SSH config names no such file.
    """
    said = _run("ssh", *ssh.identity(host), "-G", "--", host.ssh_host)
    files = next((line.split()[1:] for line in said.splitlines() if line.startswith("userknownhostsfile ")), [])
    if not files or files[0] in ("none", os.devnull):
        raise ArgumentError(
            f"your SSH config saves no host keys (UserKnownHostsFile {' '.join(files)}): set this option to a file"
        )
    return Path(os.path.expanduser(files[0]))


def remember(host: Host, keys: Sequence[str]) -> bool:
    """Write the host keys of `host` into the user's known_hosts file. Return whether they replaced other keys.

    Raises:
        ArgumentError: the SSH config names no file for host keys.
        OSError: the file cannot be written.
    """
    file = known_hosts_of(host)
    name = host.ssh_host if host.port in (None, 22) else f"[{host.ssh_host}]:{host.port}"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = _run("ssh-keygen", "-F", name, "-f", str(file), fails=False) if file.exists() else ""
    there = {" ".join(line.split()[1:3]) for line in before.splitlines() if line and not line.startswith("#")}
    if there == set(keys):
        return False
    if there:
        _run("ssh-keygen", "-R", name, "-f", str(file))
    with open(file, "a+", encoding="utf-8", errors="surrogateescape") as out:
        out.seek(0)
        torn = "\n" if (text := out.read()) and not text.endswith("\n") else ""
        out.write(torn + "".join(f"{name} {key}\n" for key in keys))
    return bool(there - set(keys))


def _run(*words: str, fails: bool = True, told: str = "") -> str:
    """Run an OpenSSH program with `told` on its standard input, and return its output."""
    try:
        done = subprocess.run(words, input=told, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ArgumentError(f"this machine has no {words[0]}: install the OpenSSH client") from None
    if done.returncode and fails:
        lines = done.stderr.strip().splitlines()
        raise ExoGymError(f"{words[0]} failed: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout
