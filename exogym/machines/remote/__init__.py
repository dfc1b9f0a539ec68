"""Train on real hosts over SSH: the hosts file, checks before a run, the launcher, and `NetworkTrainer`."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["Check", "Host", "HostsConfig", "NetworkTrainer", "SSHLauncher", "check_hosts"]

if TYPE_CHECKING:
    from exogym.machines.remote.hosts import Host, HostsConfig
    from exogym.machines.remote.inspection import Check, check_hosts
    from exogym.machines.remote.launcher import SSHLauncher
    from exogym.machines.remote.network_trainer import NetworkTrainer
else:
    __getattr__, __dir__ = lazily(__name__)
