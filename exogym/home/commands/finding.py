"""Find the computers of a network, let the user choose some, pair with these, and write a hosts file."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from exogym.cli.asking import Asker, say
from exogym.errors import ArgumentError
from exogym.home.commands.agent import needs_packages
from exogym.home.commands.discover import agents, chosen
from exogym.home.discovery import Found, enrol, pair
from exogym.home.discovery.announcing import own_address
from exogym.home.discovery.channel import PairingError, typed_code
from exogym.home.discovery.pairing import own_entry, write_entry
from exogym.progress import notice
from exogym.remote import HostsConfig

FIND_S = 3.0
TRIES = 3  # to type a code
NONE_FOUND = (
    "no computers were found. On each of the other computers, install the same version of exogym and keep exogym agent "
    "running. All computers must be on this network. On a guest network, or behind a firewall that blocks UDP port "
    "5353, start again with --at and the address that exogym agent shows"
)
READ, LOOK = "read", "look"


class Finder:
    """Lets the user choose computers of the network, and writes them into a hosts file.

    Args:
        asker: asks the questions.
        file: the hosts file.
        key, ssh_config: see `machines.discovery.enrol`.
        address: the address of this computer for the other computers. None means the default route's.
    """

    def __init__(self, asker: Asker, file: Path, key: str, ssh_config: str | None, address: str | None):
        self.asker, self.file, self.key, self.ssh_config, self.address = asker, file, key, ssh_config, address

    def find(self, computers: str | None, codes: Mapping[str, str], places: Sequence[str], here: bool | None) -> None:
        """Ask which computers to use, and pair with the chosen computers that are not yet in the hosts file.

        Raises:
            ArgumentError: no computer was found, a named computer does not answer, or its code is missing.
        """
        if self.file.exists() and computers is None:
            known = [host.address for host in HostsConfig.load(self.file).hosts]
            choices = {READ: f"the hosts in {self.file}: {', '.join(known)}", LOOK: "look for other computers"}
            if self.asker.choose("--hosts", "Which computers?", choices, READ) == READ:
                return
        needs_packages()
        for one in self._chosen(computers, places):
            if one.address not in self._known():
                self._pair(one, codes)
        asked = "Train on this computer too?"
        if here is None:
            here = self.asker.sure(asked) if self.asker.can_ask else True
        if here:
            self._add_this()

    def _known(self) -> list[str]:
        return [host.address for host in HostsConfig.load(self.file).hosts] if self.file.exists() else []

    def _chosen(self, computers: str | None, places: Sequence[str]) -> list[Found]:
        while True:
            say("looking for computers on this network ...")
            found = [one for one in agents(FIND_S, places) if one.answers]
            if found or not self.asker.can_ask:
                break
            say(NONE_FOUND)
            if not self.asker.sure("Look again?"):
                raise ArgumentError("no computers were found")
        if not found:
            raise ArgumentError(NONE_FOUND)
        if computers == "all":
            return found
        if computers is not None:
            return [chosen(found, name.strip()) for name in computers.split(",")]
        names = {one.address: f"{one.name} at {one.address}" for one in found}
        wanted = self.asker.several("--computers", f"Found {len(found)}. Which computers do you want to use?", names)
        return [one for one in found if one.address in wanted]

    def _pair(self, one: Found, codes: Mapping[str, str]) -> None:
        given = codes.get(one.name, codes.get(one.address))
        for left in reversed(range(TRIES)):
            question = f"Code that {one.name} at {one.address} shows:"
            code = given or self.asker.text(f"--code {one.name}=CODE", question, typed_code)
            try:
                paired = pair(one.address, one.port, code, self.key)
                break
            except PairingError as error:
                if given is not None or not left:
                    raise
                notice(str(error))
        enrol(paired, self.file, self.key, self.ssh_config)
        say(f"paired with {one.name}")

    def _add_this(self) -> None:
        address = own_address(self.address)
        write_entry(self.file, own_entry(address), None)
        say(f"this computer takes part as {address} ({socket.gethostname()}); hosts file: {os.fspath(self.file)}")
