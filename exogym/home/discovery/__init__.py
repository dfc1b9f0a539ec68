"""Find computers in a network, and pair with them by a short code. Needs the extra `discover`.

- `Agent` runs on a computer, shows a code, and pairs with callers (other computers) that know this code. `announced`
  announces an agent in the network by mDNS.
- `find` lists the announced agents. `pair` pairs with an agent by its code.
- `enrol` prepares a paired computer for runs: it saves the computer's host key, tests the login with the key, and adds
  the computer to the hosts file.

Announcements are not trusted. Callers without the code only learn the agent's name.

In this example one computer runs an agent, and on another computer somebody types the agent's code:

>>> import getpass
>>> def wait_here(name: str, address: str) -> None:
...     agent = Agent(name, address, 0, user=getpass.getuser())
...     with announced(name, address, agent.port):
...         agent.serve()
>>> def take_in(code: str, key: str):
...     found: Found = find(seconds=1.0)[0]
...     paired: Paired = pair(found.address, found.port, code, key)
...     return enrol(paired, "distributed_hosts.json", key)
>>> pair("127.0.0.1", 9, "not a code", "~/.ssh/exogym_ed25519")
Traceback (most recent call last):
...
exogym.errors.ArgumentError: ...
"""

from exogym.home.discovery.agent import Agent
from exogym.home.discovery.announcing import Found, announced, find
from exogym.home.discovery.pairing import Paired, enrol, pair

__all__ = ["Agent", "Found", "Paired", "announced", "enrol", "find", "pair"]
