"""Computers that find each other in a network, and pair by a short code.

`Agent` waits on a computer and pairs with who knows the code it shows, `announced` announces it by mDNS; `find` lists
the agents there are, `pair` is the other side of the code, and `enrol` makes of a pairing what runs need: a login by
key, a host key that is known, and an entry of the hosts file. Needs the extra `discover`.

Nothing here is trusted for having been announced. Before the code an agent tells its name only.

On one computer an agent waits; on another somebody types the code that it shows:

>>> import getpass
>>> def wait_here(name: str, address: str) -> None:
...     agent = Agent(name, address, 0, user=getpass.getuser(), facts=facts())
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

from exogym.machines.discovery.agent import Agent
from exogym.machines.discovery.announcing import Found, announced, find
from exogym.machines.discovery.facts import facts
from exogym.machines.discovery.pairing import Paired, enrol, pair

__all__ = ["Agent", "Found", "Paired", "announced", "enrol", "facts", "find", "pair"]
