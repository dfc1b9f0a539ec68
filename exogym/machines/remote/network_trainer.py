"""`NetworkTrainer`: run a script's training on the hosts of a hosts file."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from exogym.core.base.devices import Device
from exogym.core.base.files import new_folder
from exogym.core.base.streams import STDERR
from exogym.core.combinations import check
from exogym.core.engine.engines import local_device, several_devices, world_size
from exogym.core.engine.equal_start import start_equal
from exogym.core.engine.world import join_world
from exogym.core.progress import notice
from exogym.core.record.metrics import Metric
from exogym.core.training.checking import checked_options, folder_of_checkpoints
from exogym.core.training.options import FitOptions, takes
from exogym.errors import ArgumentError, WorkerError, check_count, checked
from exogym.machines.launch.door import SECRET
from exogym.machines.remote import results
from exogym.machines.remote.elastic import recovery as elastic
from exogym.machines.remote.elastic.member import membership
from exogym.machines.remote.elastic.recovery import Assembly
from exogym.machines.remote.elastic.wire import Elastic
from exogym.machines.remote.hosts import HostsConfig
from exogym.machines.remote.launcher import SSHLauncher, from_here
from exogym.machines.remote.orders import RUNS
from exogym.machines.remote.world import LaunchedPart, own_wire
from exogym.trainer import LocalTrainer, Trainer

_fits = itertools.count(1)  # numbers the calls of `fit`, equally here and on the hosts
_folders: dict[str, Path] = {}  # the running script's folder, made by its first fit


class NetworkTrainer(Trainer):
    """Train on real hosts: `fit` runs the calling script in every slot of every host, and waits for the result.

    On the controller, where you start the script, `fit` checks the hosts, starts the script on them with `SSHLauncher`,
    waits, fetches the final model and the history, and returns. In a process on a host, `fit` trains like
    `LocalTrainer` under torchrun and then ends the process, so code before `fit` runs everywhere, but code after `fit`
    only on the controller. Every host reads the data itself, and nothing is unpickled. The initial weights come from
    rank 0, on the master. If a script calls `fit` several times, each call starts the script on the hosts again, where
    earlier calls return their recorded results without training.

    Under plain torchrun, `NetworkTrainer` behaves like a `LocalTrainer`.

    Args:
        hosts_config: a hosts file, or a dict (see `HostsConfig.load`).
        model, train_dataset, val_dataset, loss_fn, metrics: see `Trainer`.
        sync: whether to copy the project's folder (the current folder) to the hosts first, with rsync.
        min_hosts: continue without lost hosts while at least this many are left, and readmit hosts that return (see
            `exogym.machines.remote.elastic`). In the meantime, the nodes of lost hosts are absent, as with
            `Faults(absent=...)`. Only for strategies of communication modules. None: the run needs all hosts.
        nodes_per_host: number of nodes on each host. A host's slots are divided evenly among its nodes, and each slot
            is a device of its node. A node's devices share the model according to `fit(node=)`, by default a
            `NodeMesh(shard=)` over all devices of the node. If `nodes_per_host` is None, `fit(node=)` determines each
            node's number of devices, by default one.
        retries: maximum number of restarts of the whole run, with exponential backoff, after losing a host (or, if
            `min_hosts` is set, if too few hosts are left). If `save_dir` is set, the run continues from the last
            checkpoint.

    Attributes:
        hosts: a `HostsConfig`, or None in a process on a host, which needs no hosts file.
        folder: the last run's folder, with its records, logs of all ranks, final model and history.
        outages: if `min_hosts` is set, the steps at which nodes were absent in the last run, by node. A simulation with
            `Faults(absent=outages, forget=True)` is bitwise identical to the run.

    >>> import torch
    >>> trainer = NetworkTrainer({"master": "localhost"}, torch.nn.Linear(2, 1), [(torch.ones(2), torch.ones(1))])
    >>> trainer.hosts.slots
    1
    """

    @checked
    def __init__(
        self,
        hosts_config: str | os.PathLike[str] | Mapping[str, Any] | HostsConfig,
        model: nn.Module,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        metrics: dict[str, Metric] | None = None,
        sync: bool = False,
        min_hosts: int | None = None,
        retries: int = 0,
        nodes_per_host: int | None = None,
    ):
        super().__init__(model, train_dataset, val_dataset, loss_fn=loss_fn, metrics=metrics)
        # Processes that were started from the hosts file don't need it.
        self.hosts = None if _in_a_world() else HostsConfig.load(hosts_config)
        self.sync, self.min_hosts, self.retries = sync, min_hosts, retries
        if nodes_per_host is not None:
            check_count("nodes_per_host", nodes_per_host)
        self.nodes_per_host = nodes_per_host
        self.folder: Path | None = None

    @takes(FitOptions, num_nodes=None)
    def fit(self, asked: FitOptions) -> nn.Module:
        """Train on the hosts, load the final weights into the trainer's model, and return this model.

        Args:
            num_nodes: number of nodes; default: one per slot of the hosts file, or one per group of slots if `node`
                gives a node several devices. More nodes are divided over the slots as evenly as possible.
            device: "auto" means each host's device in the hosts file.
            processes: leave it out: the hosts file's slots determine the number of processes.
            logger, callbacks: run in rank 0, on the master. Files that they write stay on the master.
            save_dir: folder for checkpoints, which all hosts share, or which is a separate folder on each host.
                A relative path starts in the project's folder.
            run_dir: the run folder, which rank 0 writes on the master. A relative path starts in the project's folder.
                By default, the run uses a folder that is copied to the controller with the results (see
                `exogym.core.record.run_folder`).
            placement: leave `engine` and `cpus_per_process` out. `max_restarts` is how often all processes may be
                restarted after a failure, from the last checkpoint.
            strategy and the other arguments: as for `LocalTrainer.fit`.

        Raises:
            ArgumentError: the arguments are invalid (see `LocalTrainer.fit`), or this is a notebook or a REPL, which
                has no script to run on the hosts.
            ExoGymError: the hosts are not ready; the message says what to do.
            WorkerError: a host failed. The output of its processes is in `folder`.
            KeyboardInterrupt: after Ctrl-C, once the processes on all hosts have ended.
        """
        if (engine := asked.placement.engine) is not None:
            check({"engine": f"{engine=}", "NetworkTrainer": "NetworkTrainer"})
        given = vars(asked) | {"save_dir": folder_of_checkpoints(asked)}
        number, part = next(_fits), LaunchedPart.of_this_process()
        if part is not None:
            return self._on_host(part, number, given)
        return self._here(given, self._local()) if _in_a_world() else self._on_controller(number, given)

    @property
    def outages(self) -> dict[int, list[tuple[int, int | None]]]:
        found = self.description.get("outages", {})
        return {int(node): [(first, last) for first, last in spans] for node, spans in found.items()}

    def _share_slots(self, slots: Sequence[int], given: dict[str, Any]) -> None:
        """Set `node` and `num_nodes` of a fit such that each host's slots are the devices of its nodes.

        Raises:
            ArgumentError: a host's slots can't be divided into whole nodes, or contradict `node`.
        """
        node, world = given["node"], sum(slots)
        if self.nodes_per_host is not None:
            if any(count % self.nodes_per_host for count in slots):
                raise ArgumentError(
                    f"nodes_per_host={self.nodes_per_host}, but the hosts have {', '.join(map(str, slots))} slots: "
                    "set each host's slots to a multiple of nodes_per_host"
                )
            devices = [count // self.nodes_per_host for count in slots for _ in range(self.nodes_per_host)]
            if node is None and max(devices) > 1:
                node = given["node"] = several_devices("fit").sharing(devices)
            if node is not None and _sizes(node, world) != devices:
                raise ArgumentError(
                    f"node={_said(node, world)} devices, but with nodes_per_host={self.nodes_per_host} the nodes have "
                    f"{', '.join(map(str, devices))} slots: leave one of the two out"
                )
        sizes = [1] * world if node is None else _sizes(node, world)
        if not {*itertools.accumulate(slots)} <= {*itertools.accumulate(sizes)}:
            raise ArgumentError(
                f"node={_said(node, world)} devices, but the hosts have {', '.join(map(str, slots))} slots, so a node "
                "would span two hosts: choose node= such that each host's slots hold whole nodes"
            )
        if given["num_nodes"] is None:
            given["num_nodes"] = len(sizes)

    # In a process of the world

    def _local(self) -> LocalTrainer:
        subject = self.subject
        return LocalTrainer(
            subject.model, subject.train_dataset, subject.val_dataset, loss_fn=subject.loss_fn, metrics=subject.metrics
        )

    def _here(self, given: dict[str, Any], local: LocalTrainer) -> nn.Module:
        """Train with a trainer of this subject."""
        part, local_size = LaunchedPart.of_this_process(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        told = () if part is None else part.slots
        self._share_slots(told or [local_size] * max(1, world_size() // local_size), given)
        try:
            return local.fit(**given)
        finally:
            self._take(results.FitResults(local.history, local.description, local.traffic))

    def _on_host(self, part: LaunchedPart, number: int, given: dict[str, Any]) -> nn.Module:
        """Train. If a controller is waiting for this fit, write the results and end the process."""
        self.folder = part.folder
        if given["device"] == "auto":
            given["device"] = part.device
        if given["progress"] is None and part.progress:
            given["progress"] = True
        if part.membership is not None:
            return self._as_a_member(part, number, given)
        if world_size() > 1:
            join_world(Device.named(local_device(given["device"])).place)
        if part.fit is not None and part.folder is not None and number < part.fit:
            self._take(results.replay(part.folder, number, self.model))
            return self.model
        start_equal(self.model, own_wire())
        if given["save_dir"] is not None and part.owns(given["save_dir"]) and part.restarts:
            given["resume"] = True
        self._write_run(part, number, given)
        self._here(given, self._local())
        if part.fit is None or part.folder is None:
            return self.model
        if part.rank == 0:
            results.write(part.folder, number, self)
        raise SystemExit(0)

    def _write_run(self, part: LaunchedPart, number: int, given: dict[str, Any], is_new: bool = True) -> None:
        """Have rank 0 write the run's folder, if the controller is waiting for it and no other folder is set."""
        if part.rank == 0 and part.folder is not None and part.fit == number and given["run_dir"] is None:
            given["run_dir"] = folder = results.run_folder_of(part.folder, number)
            if is_new and not given["resume"]:
                results.make_room(folder)

    def _as_a_member(self, part: LaunchedPart, number: int, given: dict[str, Any]) -> nn.Module:
        """Train with the hosts that are present."""
        size, given["placement"] = sum(part.slots), replace(given["placement"], max_restarts=0)
        assert part.membership is not None
        given["num_nodes"] = given["num_nodes"] or size
        with membership(*part.membership, part.rank, os.environ[SECRET]) as member:
            check_one_fit(number)
            if member.fresh and member.again and given["save_dir"] is None:
                raise WorkerError(
                    "all processes were lost, and there is no checkpoint to continue from: pass save_dir and "
                    "checkpoint_interval"
                )
            if member.fresh and given["save_dir"] is not None:
                owns = part.owns(given["save_dir"])
                given["resume"] = given["resume"] or member.again or (owns and part.restarts > 0)
            self._write_run(part, number, given, member.fresh)
            generation = member.ready("fresh") if member.fresh else None
            local, assembly = self._local(), Assembly(member)
            local.engine, local.assembles = Elastic(member, size, generation), assembly
            try:
                self._here(given, local)
            finally:
                self.description["outages"] = assembly.outages()
            member.tell("finished")
            if part.folder is not None and (assembly.is_main or part.local_rank == 0):
                results.write(part.folder if assembly.is_main else results.aside(part.folder, part.rank), number, self)
        if part.fit is None:
            return self.model
        raise SystemExit(0)

    # On the controller

    def _on_controller(self, number: int, given: dict[str, Any]) -> nn.Module:
        assert self.hosts is not None
        slots = self.hosts.slots
        self._share_slots([host.slots for host in self.hosts.hosts], given)
        restarts = given["placement"].max_restarts
        if self.min_hosts is not None:  # a restarted host copies the others' state and needs no checkpoint
            given["placement"] = replace(given["placement"], max_restarts=0)
        options = checked_options(FitOptions(**given))
        if options.nodes is None and options.num_nodes < slots:
            raise ArgumentError(
                f"num_nodes={options.num_nodes}, but the hosts file has {slots} slots, and each slot needs a node: "
                f"pass at least {slots}"
            )
        if self.min_hosts is not None:
            elastic.check(options)
            check_one_fit(number)
        if options.nodes is not None:
            options.nodes.processes(slots)
        if options.processes not in (1, slots):
            hosts = {"NetworkTrainer": f"a hosts file of {slots} slots"}
            check({"processes": f"processes={options.processes}"} | hosts)
        script, is_module = calling_script()
        self.folder = _folder_of(script)
        launcher = SSHLauncher(
            self.hosts, sync=self.sync, max_restarts=restarts, min_hosts=self.min_hosts,
            retries=self.retries,
        )  # fmt: skip
        again = ""
        if options.save_dir is not None and not options.resume:
            again = "; the same fit with resume=True continues from the last checkpoint"
        try:
            code = results.carry_out(
                launcher, self.folder, number, script, *sys.argv[1:], module=is_module,
                shows_progress=options.progress is None and STDERR.isatty(),
                save_dir=None if options.save_dir is None else os.fspath(options.save_dir),
                mirrors=options.run_dir is None,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; the processes on all hosts have ended{again}") from None
        if code:
            what = launcher.first_failure or f"the run ended with exit code {code}"
            raise WorkerError(f"{what}; the logs of all ranks are in {self.folder}{again}")
        self._take(results.read(self.folder, number, self.model))
        self.history.to_csv(self.folder / f"fit_{number}.history.csv")
        step = max(self.history.column("step")[0].tolist(), default=0)
        notice(f"finished: step {step}; model, history and logs in {from_here(self.folder)}")
        return self.model

    def _take(self, found: results.FitResults) -> None:
        self.history, self.description, self.traffic = found.history, found.description, found.traffic


def check_one_fit(number: int) -> None:
    """Raise ArgumentError if a script with `min_hosts` calls `fit` a second time."""
    if number > 1:
        check({"min_hosts": "min_hosts", "a second fit": "a second fit in a script"})


def _sizes(node: Any, world: int) -> list[int]:
    """Return each node's number of devices. One split for all nodes is repeated for `world` processes."""
    if not isinstance(node, list | tuple):
        size = getattr(node, "size", 1)
        return [size] * (world // size)
    return [getattr(one, "size", 1) for one in node]  # other values are refused with the options


def _said(node: Any, world: int) -> str:
    return f"{node} is {node.size}" if hasattr(node, "size") else f"nodes of {_sizes(node, world)}"


def _in_a_world() -> bool:
    """Return whether SSHLauncher, torchrun or a similar launcher started this process."""
    if LaunchedPart.of_this_process() is not None:
        return True
    return "RANK" in os.environ and ("TORCHELASTIC_RUN_ID" in os.environ or world_size() > 1)


def _folder_of(script: str) -> Path:
    if script not in _folders or not _folders[script].exists():
        _folders[script] = new_folder(Path(RUNS).absolute(), Path(script).stem)
    return _folders[script]


def calling_script() -> tuple[str, bool]:
    """Return the running script: (path, False), or (module name, True).

    Raises:
        ArgumentError: a notebook, a REPL or `python -c` is running.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.removesuffix(".__main__"), True
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ArgumentError(
            "NetworkTrainer runs the calling script on every host, but a notebook, a REPL or python -c has no script: "
            "write the training into a file and run python train.py, or train on this machine with LocalTrainer"
        )
    return os.path.abspath(path), False
