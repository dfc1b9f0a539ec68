"""Computers that find each other in a network, and pair by a short code.

`Agent` waits on a computer and pairs with who knows the code it shows, `announced` announces it by mDNS; `find` lists
the agents there are, `pair` is the other side of the code, and `enrol` makes of a pairing what runs need: a login by
key, a host key that is known, and an entry of the hosts file. Needs the extra `discover`.

Nothing here is trusted for having been announced. Before the code an agent tells its name only.
"""

from exogym.discovery.agent import Agent
from exogym.discovery.announcing import Found, announced, find
from exogym.discovery.facts import facts
from exogym.discovery.pairing import Paired, enrol, pair

__all__ = ["Agent", "Found", "Paired", "announced", "enrol", "facts", "find", "pair"]
