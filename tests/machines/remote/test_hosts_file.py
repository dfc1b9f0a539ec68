"""The hosts file: what it says, and one clear line for whatever is wrong with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exogym.cli import main
from exogym.errors import ArgumentError, ExoGymError
from exogym.machines.launch.door import SECRET
from exogym.machines.remote import Host, HostsConfig, ssh
from exogym.machines.remote.inquiry import diagnose
from exogym.machines.remote.onhost.interfaces import addresses, interface_of
from exogym.machines.remote.orders import inside, orders
from exogym.machines.remote.sync import sync_project, sync_words

DOCUMENTED = {
    "master": "192.168.1.100",
    "workers": ["192.168.1.101", "192.168.1.102"],
    "ssh_user": "matt",
    "ssh_key_path": "~/.ssh/id_rsa",
    "python_env": "/opt/anaconda3/envs/whisper/bin/python",
    "project_path": "/Users/matt/whisper-fine-tuner-macos",
}


def test_the_documented_file(tmp_path: Path) -> None:
    path = tmp_path / "distributed_hosts.json"
    path.write_text(json.dumps(DOCUMENTED))
    config = HostsConfig.load(path)
    assert config == HostsConfig.load(str(path)) == HostsConfig.load(DOCUMENTED) == HostsConfig.load(config)
    assert [host.address for host in config.hosts] == ["192.168.1.100", "192.168.1.101", "192.168.1.102"]
    assert config.slots == 3 and config.master_port == 29500
    for host in config.hosts:
        assert (host.user, host.python, host.path) == (
            "matt", "/opt/anaconda3/envs/whisper/bin/python", "/Users/matt/whisper-fine-tuner-macos"
        )  # fmt: skip
        assert host.key == str(Path.home() / ".ssh" / "id_rsa")
        assert (host.device, host.slots, host.ssh_host) == ("auto", 1, host.address)


def test_a_host_says_otherwise() -> None:
    own = {
        "address": "10.0.0.7", "ssh_host": "studio", "user": "ann", "key": "/k", "port": 2222,
        "python": "~/env/bin/python", "path": "~/w", "device": "cuda:1", "slots": 3,
    }  # fmt: skip
    config = HostsConfig.load(DOCUMENTED | {"workers": ["192.168.1.101", own], "master_port": 4000, "ssh_port": 23})
    host = config.hosts[2]
    assert host == Host("10.0.0.7", "studio", "ann", "/k", 2222, "~/env/bin/python", "~/w", "cuda:1", 3)
    assert config.hosts[1].port == 23 and config.master_port == 4000
    assert [list(config.ranks(i)) for i in range(3)] == [[0], [1], [2, 3, 4]]


def test_the_python_that_is_meant() -> None:
    assert Host("10.0.0.7", "10.0.0.7").interpreter == "python3"
    assert Host("localhost", "localhost").interpreter == sys.executable
    assert Host("localhost", "localhost", python="/p").interpreter == "/p"


def test_this_machine_needs_no_ssh() -> None:
    assert all(Host(name, name).is_local for name in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not Host("192.0.2.77", "192.0.2.77").is_local
    own = next((address for name, address in addresses() if name != "lo" and "%" not in address), "127.0.0.1")
    assert Host(own, own).is_local or own.startswith("fe80")
    assert not Host("192.0.2.77", "localhost").is_local  # the name for ssh is not the address


WRONG = {
    "no master": ({}, "master is missing"),
    "misspelt": ({"mastr": "a"}, "no field 'mastr': did you mean 'master'?"),
    "misspelt inside": ({"master": {"address": "a", "slot": 2}}, "no field 'master.slot': did you mean 'slots'?"),
    "workers": ({"master": "a", "workers": "b"}, "workers='b'; expected a list"),
    "number": ({"master": "a", "workers": [7]}, "workers[0]=7; expected an address, or an object"),
    "no address": ({"master": {"slots": 2}}, "master.address is missing"),
    "slots": ({"master": {"address": "a", "slots": 0}}, "master.slots=0 must be a whole number of at least 1"),
    "slots true": ({"master": {"address": "a", "slots": True}}, "master.slots=True must be a whole number"),
    "port": ({"master": "a", "ssh_port": "22"}, "ssh_port='22'; expected a port"),
    "own port": ({"master": "a", "workers": [{"address": "b", "port": 70000}]}, "[0].port=70000; expected a port"),
    "master_port": ({"master": "a", "master_port": 0}, "master_port=0; expected a port"),
    "device": ({"master": {"address": "a", "device": "cuda 0"}}, "master.device='cuda 0'; expected auto, cpu, cuda"),
    "path": ({"master": "a", "project_path": "here"}, "project_path='here'; expected an absolute path of a folder"),
    "python": ({"master": "a", "python_env": "env/bin/python"}, "python_env='env/bin/python'; expected the path"),
    "null": ({"master": "a", "ssh_user": None}, "ssh_user=null; expected a value"),
    "twice": ({"master": "a", "workers": ["b", "b"]}, "workers[1]='b' occurs twice; expected one entry"),
    "localhost": ({"master": "localhost", "workers": ["10.0.0.2"]}, "workers[0]='10.0.0.2' beside master='localhost'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    fields, message = WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        HostsConfig.load(fields)
    assert str(caught.value).startswith("hosts: ") and message in str(caught.value)


HOSTILE = [
    "-oProxyCommand=touch pwned",
    "a;touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "a b",
    "a\nb",
    "a'b",
    'a"b',
    "",
]
HOSTILE += ["a|b", "a&b", "a\\b", "a/b", "a%h", "user@host", "ssh://host", "\u200bhost", "hóst", "-", "a\0b"]


@pytest.mark.parametrize("value", HOSTILE)
def test_no_hostile_host_or_user(value: str) -> None:
    for fields, field in (
        ({"master": value}, "master"),
        ({"master": "a", "workers": [{"address": value}]}, "workers[0].address"),
        ({"master": {"address": "a", "ssh_host": value}}, "master.ssh_host"),
    ):
        with pytest.raises(
            ArgumentError, match=rf"^hosts: {field.replace('[', '.').replace(']', '.')}=.*expected a host name"
        ):
            HostsConfig.load(fields)
    if value != "user@host":  # some sites have such user names; ssh is given it after -l
        with pytest.raises(ArgumentError, match=r"^hosts: ssh_user=.*expected a user name"):
            HostsConfig.load({"master": "a", "ssh_user": value})


@pytest.mark.parametrize("field", ["python_env", "project_path", "ssh_key_path", "ssh_config_path"])
@pytest.mark.parametrize("value", ["-oProxyCommand=x", "a\nb", "\0", "", "\x1b[2J", "${HOME}/k"])
def test_no_hostile_path(field: str, value: str) -> None:
    made = None
    try:
        made = HostsConfig.load({"master": "a", field: value})
    except ArgumentError as error:
        assert str(error).startswith(f"hosts: {field}=")
    if made is not None:  # taken for the name of a file here, by its whole path, which is no option
        assert value.startswith("-") and field in ("ssh_key_path", "ssh_config_path")
        assert (made.master.key or made.master.ssh_config or "").startswith("/")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    with pytest.raises(ArgumentError, match=r"cannot be read .*: write one, such as"):
        HostsConfig.load(path)
    for text, message in (
        ("{", "hosts.json: invalid JSON at line 1"),
        ("[]", "hosts.json must hold an object .*, not list"),
        ('{"master": "a", "master": "b"}', "'master' occurs twice"),
    ):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=message):
            HostsConfig.load(path)
    with pytest.raises(ArgumentError, match="or a dict, not int"):
        HostsConfig.load(7)  # type: ignore[arg-type]


# What follows from it


def test_words_survive_the_remote_shell() -> None:
    """A shell that splits what ssh sends gets the words that were meant, and runs nothing else."""
    host = Host("10.0.0.2", "10.0.0.2", user="ann")
    words = [
        "printf",
        r"%s\0",
        "a b",
        "it's",
        'say "x"',
        "$(touch pwned)",
        "`id`",
        ";",
        "a\nb",
        "*",
        "-o",
        "é",
        "\\",
        "",
    ]
    sent = ssh.command(host, words)
    assert sent[:1] == ["ssh"] and sent[-3:-1] == ["--", "10.0.0.2"]
    for shell in ("sh", "bash"):
        split = subprocess.run([shell, "-c", sent[-1]], capture_output=True, text=True, check=True).stdout
        assert split.split("\0")[:-1] == words[2:]
    assert ssh.command(Host("localhost", "localhost"), words) == words
    with pytest.raises(ArgumentError, match="zero byte"):
        ssh.command(host, ["a\0b"])


def test_options_of_ssh(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host lax\n StrictHostKeyChecking no\nHost new\n StrictHostKeyChecking accept-new\n")
    checking = "StrictHostKeyChecking=yes"
    words = ssh.client(Host("10.0.0.2", "strict", "ann", "/key", 2222, ssh_config=str(config)))
    assert words[:7] == ["ssh", "-F", str(config), "-i", "/key", "-p", "2222"] and words[-2:] == ["-l", "ann"]
    assert "BatchMode=yes" in words and checking not in words
    assert checking not in ssh.client(Host("10.0.0.2", "new", ssh_config=str(config)))
    assert checking in ssh.client(Host("10.0.0.2", "lax", ssh_config=str(config)))  # never unchecked


def test_an_endless_config_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distributed-train", "mine", "--config", "/dev/zero"]) == 2
    assert "the config file '/dev/zero' is longer than 1 MiB" in capsys.readouterr().err


def test_what_a_host_is_told() -> None:
    config = HostsConfig.load(
        {"master": "10.0.0.1", "workers": [{"address": "10.0.0.2", "slots": 2, "path": "~/w", "device": "mps"}]}
    )
    first, second = orders(
        config, "./train.py", ["--name", "$(x)"], module=False, project="/p", environment={"A": "b c"}, max_restarts=3,
    )  # fmt: skip
    assert (first.folder, second.folder, list(second.ranks)) == ("/p", "~/w", [1, 2])
    secret = second.environment.pop(SECRET)
    assert second.environment == {"OMP_NUM_THREADS": "1", "EXOGYM_DEVICE": "mps", "EXOGYM_SLOTS": "1,2", "A": "b c"}
    assert secret == first.environment[SECRET] and len(secret) >= 32
    line = " ".join(second.words)
    assert line.startswith("-m exogym.launch --nproc_per_node 2 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 ")
    assert second.words[-4:] == ["./train.py", "--", "--name", "$(x)"]
    assert "ranks" not in second.given() and second.given()["address"] == "10.0.0.2"


def test_the_script_lies_in_the_project(tmp_path: Path) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    assert inside(str(tmp_path / "p"), tmp_path / "p" / "a" / "-t.py") == "./a/-t.py"  # never taken for an option
    with pytest.raises(ArgumentError, match="is outside the project's folder"):
        inside(str(tmp_path / "p"), tmp_path / "q.py")


def test_the_copy_that_is_made() -> None:
    host = Host("fd00::2", "fd00::2", "ann", key="/it's a key", path="~/my project")
    words = sync_words(host, "/home/ann/p")
    assert words[-3:] == ["--", "/home/ann/p/", "[fd00::2]:my project/"]
    assert "'/it''s a key'" in words[words.index("--rsh") + 1] and "--secluded-args" in words
    assert {"--exclude=.git", "--exclude=.venv", "--exclude=runs"} <= set(words)
    assert f"--exclude=step_{'[0-9]' * 10}*/" in words  # a host's own checkpoints
    local = sync_words(Host("localhost", "localhost", path="/elsewhere"), "/p")
    assert local[-2:] == ["/p/", "/elsewhere/"] and "--rsh" not in local


@pytest.mark.parametrize(
    ("status", "said", "meaning"),
    [
        (11, "", "because the host's disk is full$"),
        (12, "rsync: not found", "rsync is missing on the host.*Its message: rsync: not found$"),
        (99, "", "man rsync"),
    ],
)
def test_how_rsync_ended_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str, meaning: str
) -> None:
    """Some statuses come without a word of rsync's own: a full disk, a killed rsync."""
    rsync = tmp_path / "bin" / "rsync"
    rsync.parent.mkdir()
    rsync.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit {status}\n")
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", f"{rsync.parent}:{os.environ['PATH']}")
    hosts = HostsConfig.load({"master": "localhost", "project_path": str(tmp_path / "there")})
    with pytest.raises(ExoGymError, match=f"rsync ended with status {status}: .*{meaning}"):
        sync_project(hosts, str(tmp_path))


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1", is_loopback=True) == interface_of("localhost", is_loopback=True)
    with pytest.raises(LookupError, match=r"no interface of the host has the address 127\.0\.0\.1; the host has"):
        interface_of("127.0.0.1")  # under a name that means another host elsewhere
    with pytest.raises(LookupError, match=r"has the address 192\.0\.2\.77"):
        interface_of("192.0.2.77")
    with pytest.raises(LookupError, match="is not known on the host itself"):
        interface_of("a" * 64)  # longer than a name may be


SAID = {
    "ssh: Could not resolve hostname x: Name or service not known": ("reachable", "ssh_host"),
    "ssh: connect to host x port 22: Connection refused": ("reachable", "start the ssh server"),
    "ssh: connect to host x port 22: Connection timed out": ("reachable", "check that the host is on"),
    "ann@x: Permission denied (publickey).": ("login", "ssh-copy-id -i KEY ann@studio"),
    "No ED25519 host key is known for x\nHost key verification failed.": ("host key", "ssh -l ann studio once"),
    "REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.": ("host key", "ssh-keygen -R studio"),
    "": ("reachable", "check that the host is on"),
}  # fmt: skip


@pytest.mark.parametrize("said", SAID)
def test_what_ssh_says_has_a_remedy(said: str) -> None:
    check, seen, remedy = diagnose(Host("10.0.0.9", "studio", "ann"), said)
    assert check == SAID[said][0] and SAID[said][1] in remedy
    assert seen == (said.splitlines()[-1] if said else "no message")
