"""Hosts over SSH: check the hosts, and start runs on them.

The names are defined in `exogym.machines.remote`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.machines.remote import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
