"""Connect to a Ray cluster or start one, count its free CPUs and GPUs, and check its machines' versions.

A cluster that ExoGym starts listens on the loopback interface only, ends with this process, and requires its own token
or, if the script imported Ray first, Ray's token in ~/.ray. Anybody who reaches a cluster's ports and has its token can
run any code there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from exogym.core.base.devices import CPU
from exogym.errors import ArgumentError, WorkerError
from exogym.machines.remote.onhost import probe
from exogym.progress import notice

ANSWER_S = 5.0  # seconds for a connection to the address
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # with 0, Ray uses 127.0.0.1 as the machine's address
STORE_BYTES = 256 * 2**20  # shared memory of a cluster started here, to send data sets

_asked: tuple[str | None, Any] | None = None  # address and runtime_env of our connection

alike: set[str] = set()  # machines of the connected cluster whose versions have been found equal to ours


def connect(address: str | None, runtime_env: Mapping[str, Any] | None) -> None:
    """Connect this process to a Ray cluster, or start one on the loopback interface; raise ArgumentError if this fails.

    Args:
        address: "auto" (this machine's cluster), "host:port", or None for the address in RAY_ADDRESS or, without it, a
            new cluster. If the script has already connected to Ray, ExoGym uses this connection.
        runtime_env: code, data and environment of the cluster's processes, as in Ray's `runtime_env`.
    """
    global _asked
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    given = address or os.environ.get("RAY_ADDRESS")
    if given is None and "ray" not in sys.modules:  # Ray reads these when it is imported
        os.environ.setdefault(LOOPBACK_ONLY, "0")
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise ArgumentError(f"engine='ray' needs Ray: pip install 'exogym[ray]' ({error})") from None
    if ray.is_initialized():
        if _asked != (given, runtime_env) and (address is not None or runtime_env is not None):
            raise ArgumentError(
                f"Ray is connected already, to {ray.get_runtime_context().gcs_address}, so address and runtime_env "
                "cannot change. Omit them, or call ray.shutdown() first"
            )
        return
    alike.clear()
    options: dict[str, Any] = {"logging_level": logging.WARNING, "runtime_env": runtime_env and dict(runtime_env)}
    if given is None:
        _start(options)
    else:
        _reach(given, options)
    _asked = (given, runtime_env)


def _start(options: dict[str, Any]) -> None:
    import ray

    ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **options)
    found = ray.util.get_node_ip_address()
    if not found.startswith("127."):
        ray.shutdown()
        raise ArgumentError(
            f"a cluster started here would listen at {found}, because Ray was imported before ExoGym connected. Set "
            f"{LOOPBACK_ONLY}=0 in the environment, or run 'ray start --head' and pass the cluster's address"
        )
    notice(f"started a Ray cluster on {found}: {readable(ray.cluster_resources())}")


def _reach(address: str, options: dict[str, Any]) -> None:
    import ray

    if address.startswith("ray://"):
        raise ArgumentError(
            f"address={address!r} belongs to Ray's client, which does not notice when processes end. Start the script "
            "on a machine of the cluster, for example with 'ray job submit', and pass address='auto'"
        )
    if address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except (OSError, ValueError, UnicodeError, OverflowError) as error:
            raise ArgumentError(
                f"no Ray cluster answers at address={address!r} within {ANSWER_S:g} s: {error}. Pass host:port as "
                "'ray start --head' prints it, 'auto' on the cluster's machines, or no address to start a cluster here"
            ) from None
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises many types: ConnectionError, RuntimeError, AuthenticationError, ...
        raise ArgumentError(f"the Ray cluster at address={address!r} cannot be used: {error}") from error


def readable(resources: Mapping[str, float]) -> str:
    """Return the numbers of CPUs and GPUs in `resources`, as text.

    >>> readable({"CPU": 4.0, "memory": 1e9, "GPU": 1.0})
    '4 CPU, 1 GPU'
    """
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "no CPU"


def has_gpus() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) >= 1


def needs_gpu(wanted: str) -> bool:
    """Return whether a process on the device `wanted` needs a GPU. On "auto" it does if the cluster has GPUs."""
    return has_gpus() if wanted == "auto" else wanted != str(CPU)


def room(need: Mapping[str, float]) -> dict[str, int]:
    """Return how many processes, which `need` these CPUs and GPUs (by Ray's names), now fit on each living machine."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray's public calls give only sums over machines

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    free = {node: found for node, found in available_resources_per_node().items() if node in alive}
    return {node: min(int(found.get(k, 0.0) / n + 1e-6) for k, n in need.items()) for node, found in free.items()}


def no_room(need: Mapping[str, float], processes: int) -> ArgumentError:
    """Return the error which says that the cluster has no room for `processes` processes."""
    import ray

    machines = [readable(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return ArgumentError(
        f"no room for {processes} process{'es' if processes > 1 else ''} of {readable(need)} each: the Ray cluster has "
        f"{len(machines)} machine{'s' if len(machines) > 1 else ''} ({'; '.join(machines)}). Free: "
        f"{readable(ray.available_resources())}. Lower processes or cpus_per_process, choose device='cpu', or wait for "
        "other users"
    )


def looker() -> Callable[[], dict[str, str | None]]:
    """Return a function that returns its process's versions, and works without ExoGym (see `by_value`)."""
    packages, package_sum = probe.packages, probe.package_sum

    def look() -> dict[str, str | None]:
        import sys

        found, code = packages(["torch", "exogym"]), package_sum("exogym")
        own = None if code is None else f"{found['exogym'] or 'not installed'} (sources {code})"
        return {"Python": "{}.{}".format(*sys.version_info), "torch": found["torch"], "exogym": own}

    return look


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """Inside, Ray sends the code of `looker`'s function, because the other process may not have ExoGym."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(probe)
    try:
        yield
    finally:
        ray.cloudpickle.unregister_pickle_by_value(probe)


def check_machines(places: Sequence[tuple[str, Any]]) -> None:
    """Raise ArgumentError unless the machines have this process's versions of Python, torch and ExoGym.

    `places` has pairs (machine, Ray's scheduling strategy for a process on this machine). A lost machine is a
    WorkerError.
    """
    import ray

    if not (new := {machine: place for machine, place in places if machine not in alike}):
        return
    look = looker()

    def look_on_machine() -> tuple[str, dict[str, str | None]]:
        import ray

        return ray.util.get_node_ip_address(), look()

    task = ray.remote(look_on_machine)
    try:
        with by_value():
            asked = [task.options(num_cpus=0, scheduling_strategy=place).remote() for place in new.values()]
        found = ray.get(asked)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise ArgumentError(f"Ray could not set up runtime_env on the cluster's machines: {error}") from error
    except ray.exceptions.RayError as error:
        raise WorkerError(f"a machine of the Ray cluster was lost before the run began: {error}") from error
    check_versions(dict(found))
    alike.update(new)


def check_versions(found: Mapping[str, Mapping[str, str | None]]) -> None:
    """Raise ArgumentError if the versions `found` on the machines differ from the versions in this process."""
    own = looker()()
    unlike = [
        f"{machine} has {name} {theirs[name]}, but this machine has {own[name]}"
        if theirs[name]
        else f"{machine} has no {name}"
        for machine, theirs in found.items()
        for name in own
        if theirs[name] != own[name]
    ]
    if unlike:
        raise ArgumentError(
            "versions on the Ray cluster differ: "
            + "; ".join(unlike)
            + ". Install the same versions there, or send them with "
            "engine=Ray(runtime_env={'py_modules': [...], 'pip': [...]})"
        )


def machines() -> list[tuple[str, Any]]:
    """Return (machine, Ray's scheduling strategy for a process on this machine) for each living machine with CPUs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ids = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return [(one, NodeAffinitySchedulingStrategy(one, soft=False)) for one in ids]
