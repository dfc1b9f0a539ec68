"""A cluster of Ray's: reached or started, the room that it has, and whether all of it has the same versions.

A cluster that is started here listens on the loopback only, asks for a token (one of its own, but where the script has
imported Ray before: then Ray's, in ~/.ray), and ends with this process. Who reaches the ports of a cluster of Ray's,
and has its token, runs what he likes there.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exogym.core.progress import notice
from exogym.errors import ArgumentError, WorkerError

ANSWER_S = 5.0  # for a connection to the address
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # where this is 0, Ray takes 127.0.0.1 for the machine's address
STORE_BYTES = 256 * 2**20  # of shared memory on a cluster that is started here: for data sets on their way

_asked: tuple[str | None, Any] | None = None  # what the connection that was made here was asked for

alike: set[str] = set()  # machines of the present connection that are known to have the versions that are here


def connect(address: str | None, runtime_env: Mapping[str, Any] | None) -> None:
    """Connect this process to a cluster, or start one on the loopback where nobody names one.

    Args:
        address: "auto" (the one that this machine is part of), "host:port", or None: what RAY_ADDRESS says, or a new
            one. A connection that the script has made is used as it is.
        runtime_env: code, data and environment of the processes there, as Ray's `runtime_env`.

    Raises:
        ArgumentError: Ray is not installed, there is no cluster, or it will not have this process.
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
                f"Ray is connected already, to {ray.get_runtime_context().gcs_address}: address and runtime_env cannot "
                "change any more. Leave them out, or call ray.shutdown() before"
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
            f"a cluster started here would listen at {found}, since Ray was imported before: set {LOOPBACK_ONLY}=0 in "
            "the environment, or start one with 'ray start --head' and name its address"
        )
    notice(f"a cluster of Ray's was started here, on {found}: {readable(ray.cluster_resources())}")


def _reach(address: str, options: dict[str, Any]) -> None:
    import ray

    if address.startswith("ray://"):
        raise ArgumentError(
            f"address={address!r} is of Ray's client, which cannot see its processes end: start the script on a "
            "machine of the cluster, as with 'ray job submit', and give address='auto'"
        )
    if address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except (OSError, ValueError, UnicodeError, OverflowError) as error:
            raise ArgumentError(
                f"no Ray cluster answers at address={address!r} within {ANSWER_S:g} s: {error}. Give host:port of its "
                "head, as 'ray start --head' prints it; 'auto' on a machine of the cluster; or none to start one here"
            ) from None
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray has many words for it: ConnectionError, RuntimeError, AuthenticationError, ...
        raise ArgumentError(f"the Ray cluster at address={address!r} cannot be used: {error}") from error


def readable(resources: Mapping[str, float]) -> str:
    """Say what of processors and GPUs there is.

    >>> readable({"CPU": 4.0, "memory": 1e9, "GPU": 1.0})
    '4 CPU, 1 GPU'
    """
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "no CPU"


def has_gpus() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) >= 1


def room(need: Mapping[str, float]) -> dict[str, int]:
    """Return how many processes, each of which needs that much, fit on each machine that lives, as of now."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray's public calls know sums over machines only

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    free = {node: found for node, found in available_resources_per_node().items() if node in alive}
    return {node: min(int(found.get(k, 0.0) / n + 1e-6) for k, n in need.items()) for node, found in free.items()}


def no_room(need: Mapping[str, float], processes: int) -> ArgumentError:
    """Return the error to raise where so many processes do not fit."""
    import ray

    machines = [readable(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return ArgumentError(
        f"no room for {processes} process{'es' if processes > 1 else ''} of {readable(need)} each: the Ray cluster has "
        f"{len(machines)} machine{'s' if len(machines) > 1 else ''} ({'; '.join(machines)}), of which "
        f"{readable(ray.available_resources())} are free. Lower processes or cpus_per_process, choose device='cpu', or "
        "wait for who uses it"
    )


def looker() -> Callable[[], dict[str, str | None]]:
    """Return a function that says what versions a process has. It travels by value: no package of ours is needed."""

    def look() -> dict[str, str | None]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import os
        import sys

        def version(name: str) -> str | None:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                return None

        spec, own = importlib.util.find_spec("exogym"), None
        if spec is not None and spec.submodule_search_locations:
            digest = hashlib.sha256()
            for top in sorted(spec.submodule_search_locations):
                for folder, folders, files in os.walk(top):
                    folders.sort()
                    for name in sorted(file for file in files if file.endswith(".py")):
                        path = os.path.join(folder, name)
                        digest.update(os.path.relpath(path, top).encode())
                        with open(path, "rb") as file:
                            digest.update(file.read())
            own = f"{version('exogym') or 'not installed'} (sources {digest.hexdigest()[:12]})"
        return {"Python": "{}.{}".format(*sys.version_info), "torch": version("torch"), "exogym": own}

    return look


def check_machines(places: Sequence[tuple[str, Any]]) -> None:
    """See that processes in those places, each on the machine that is named with it, have the versions that are here.

    Raises:
        ArgumentError: they have not.
        WorkerError: a machine is lost.
    """
    import ray

    if not (new := {machine: place for machine, place in places if machine not in alike}):
        return
    look = looker()

    def look_there() -> tuple[str, dict[str, str | None]]:
        import ray

        return ray.util.get_node_ip_address(), look()

    task = ray.remote(look_there)
    try:
        found = ray.get([task.options(num_cpus=0, scheduling_strategy=place).remote() for place in new.values()])
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise ArgumentError(
            f"the runtime environment could not be made on the machines of the cluster: {error}"
        ) from error
    except ray.exceptions.RayError as error:
        raise WorkerError(f"a machine of the Ray cluster was lost before the run began: {error}") from error
    check_versions(dict(found))
    alike.update(new)


def check_versions(found: Mapping[str, Mapping[str, str | None]]) -> None:
    """Hold what processes have, by their machine, against this one: other versions give other bits, or none.

    Raises:
        ArgumentError: they differ.
    """
    here = looker()()
    unlike = [
        f"{machine} has {name} {there[name]}, here is {here[name]}" if there[name] else f"{machine} has no {name}"
        for machine, there in found.items()
        for name in here
        if there[name] != here[name]
    ]
    if unlike:
        raise ArgumentError(
            "the machines of the Ray cluster are not alike: "
            + "; ".join(unlike)
            + ". Install the same there, or bring "
            "it along with engine=Ray(runtime_env={'py_modules': [...], 'pip': [...]})"
        )


def machines() -> list[tuple[str, Any]]:
    """Return the machines that have processors, each with the place that is it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ids = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return [(one, NodeAffinitySchedulingStrategy(one, soft=False)) for one in ids]
