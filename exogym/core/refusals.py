"""The table of features that can't be combined: pairs, each with its reason and an alternative.

An option that is set is a feature under its name (`delay`), and so is an option with a value (`compute="vmap"`) or a
missing option ("no network"). For the meaning of another name, search the package for the `features()` that returns it.
"""

from __future__ import annotations

from typing import NamedTuple

# A strategy with `tried`, as each method of `exogym.contrib` has it, is refused with these features, except those that
# `tried` names. What every run has is not here: data, seeds, evaluation, checkpoints, processes, networks.
UNTRIED: tuple[str, ...] = (
    *("faults", "bad_nodes", "balance", 'compute="vmap"', 'precision="fp16"', 'on_nonfinite="skip"'),
    *("node", "node in several processes", "engine", "client_state_memory", "attach", "min_hosts"),
)


class Refused(NamedTuple):
    """Two features that can't be combined, the reason, and what to do instead.

    `one` and `other` may be several names: none of `one` can be combined with any of `other`.

    >>> Refused("timeline", ("this", "that"), "...", "...").pairs
    [('timeline', 'this'), ('timeline', 'that')]
    """

    one: str | tuple[str, ...]
    other: str | tuple[str, ...]
    reason: str
    instead: str

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of names that the row refuses."""
        ones, others = ((names,) if isinstance(names, str) else names for names in (self.one, self.other))
        return [(one, other) for one in ones for other in others]


# Checked from the top: the first row whose two features a run has makes the error.
REFUSED: tuple[Refused, ...] = (
    # How means are taken
    Refused(
        "privacy",
        ("robust", 'robust="norm_cap"', "tuner", "island_size"),
        "epsilon counts a server's mean, which one client changes by at most C/(qN), for clip=C and qN clients in a "
        "round. Rules, caps and budgets read more of the clients' values, islands have no server, and the reported "
        "epsilon would be false",
        "leave one of them out",
    ),
    Refused(
        ("robust", "secure_aggregation", "client_fraction", "privacy"),
        'transport="ring" or "tree"',
        "a server must see each node's values (rules, masks) or send the parameters to the next round's clients, which "
        "may not have averaged. This transport has no server, and sums values on the way",
        "leave transport out, or use 'server'",
    ),
    Refused(
        "secure_aggregation",
        "packed values",
        "the server sees sums only, so it cannot pass on one node's values to others",
        "leave secure_aggregation out",
    ),
    Refused(
        "robust",
        "its own mean",
        "a rule replaces a mean, and this strategy has no mean that a rule could replace",
        "leave robust out, or use 'norm_cap'",
    ),
    Refused(
        "robust",
        "values right in the mean only",
        "a rule compares the nodes' whole values. A median of mostly zeros is zero, and a node drops the values that "
        "it sent, so training stops. A rule over only the nodes that sent an entry would accept a bad node's entries "
        "unchanged",
        "leave robust out, or use 'norm_cap'",
    ),
    Refused(
        ("robust", "privacy"),
        ("weights by examples", 'balance="batch" or "steps"'),
        "a rule counts each node once, and privacy bounds each client's influence, so all weights must be equal",
        "pass weighting='uniform', or balance='nodes'",
    ),
    Refused(
        "privacy",
        "buffers that change",
        "the buffers would be averaged without noise",
        "use a model without such buffers, for example with LayerNorm or GroupNorm instead of BatchNorm",
    ),
    # Options of strategies
    Refused(
        "gradient_modules",
        ("corrections", "nodes that rest"),
        "gradient modules replace all nodes' gradients at every step. A correction needs each node's own "
        "gradient, and clients that are sampled or take fewer steps have none",
        "leave one of them out",
    ),
    Refused(
        ("personal", "two kinds of steps"),
        ("privacy", 'robust="norm_cap"'),
        "clipping and caps would count the movement of personal parameters, which are never sent",
        "leave one of them out, or use another rule, such as 'median'",
    ),
    Refused(
        "personal",
        "bad_nodes",
        "an attack changes a node's whole row, and parameters that are never sent would stay wrong",
        "leave one of them out",
    ),
    Refused(
        ("local_steps", "local_epochs"),
        "two kinds of steps",
        "the strategy divides the H steps of a round",
        "leave it out, and pass H",
    ),
    Refused("local_steps", "local_epochs", "both set a client's number of steps", "pass only one of them"),
    Refused(
        ("local_steps", "local_epochs", "delay", "island_H", "rounds of one length"),
        "rounds of different lengths",
        "a round's steps are planned in advance, which needs rounds of one length",
        "pass a number as H, without a ByteBudget",
    ),
    Refused(
        "its own clock",
        "H as a function",
        "each node has its own rounds",
        "pass H as a number; dylu=True lets slow nodes take fewer steps",
    ),
    Refused(
        "eager",
        ("delay", "island_H"),
        "eager=True already waits a whole round for the average, which leaves no time for another one",
        "leave one of them out",
    ),
    Refused(
        "tuner",
        ("nothing to tune", "H as a function", "gradient_modules"),
        "a budget changes H, a number, during the run, and all bytes must depend on it",
        "leave ByteBudget out, or pass the first H as a number and use a strategy without gradient modules",
    ),
    # A node of several devices
    Refused(
        "node",
        ("compute", "processes", "engine"),
        "a split node computes step by step, in one process or (under python -m exogym.launch) in one per device",
        "leave compute, processes and engine out",
    ),
    Refused(
        "stages",
        'precision="fp16"',
        "the earlier stages do not know the loss's scale",
        "use 'bf16' or 'fp32'",
    ),
    Refused(
        ("node in several processes", "min_hosts"),
        "max_memory_usage",
        "ExoGym measures a step's memory once, before a model is split and before another host joins",
        "pass minibatch_size instead",
    ),
    Refused(
        "node in several processes",
        "acts_on left unsaid",
        "each process has a part of every parameter",
        'set acts_on in your class: "elements" (works on any columns), "tensors" (needs whole parameters) or "row" '
        "(needs the node's whole row)",
    ),
    Refused(
        "node in several processes",
        ("secure_aggregation", "an outer optimizer of whole tensors"),
        "it needs a node's whole row or whole tensors, and each process has only a part of them",
        "leave secure_aggregation out, or use an optimizer that treats each element separately ('sgd', 'adam', ...)",
    ),
    Refused(
        "node in several processes",
        "an optimizer from a function",
        "the function would get only parts of the parameters, which have other shapes",
        "describe the optimizer by a class: OptimSpec(cls, groups=[...], ...)",
    ),
    Refused(
        "node in several processes",
        ('balance="nodes"', "balance without speeds"),
        "each node has its own processes, so a node's speed is known only after the model is split",
        "pass speeds, as in Balance('batch', speeds=[1, 2]), or leave balance out",
    ),
    Refused(
        "node in several processes",
        "save_dir of each host",
        "each process holds a part of its node's rows",
        "pass a folder that all hosts share",
    ),
    # Computing, and processes
    Refused(
        'compute="vmap"',
        ("minibatch_size", "gradient_accumulation", "max_memory_usage", "its own clock", 'precision="fp16"'),
        "vmap computes all rows at once, each with its whole batch and an unscaled loss",
        "use compute='loop'",
    ),
    Refused(
        ("processes", "engine"),
        ("processes of a launcher", "NetworkTrainer"),
        "the launcher or the hosts file determines where processes start, and how many",
        "leave processes and engine out, or train with LocalTrainer in one script",
    ),
    Refused(
        "processes",
        "no forks",
        "processes are forked from this process, which is safe only on Linux and on the CPU",
        "leave processes out, and start the script with python -m exogym.launch --nproc_per_node",
    ),
    Refused(
        "cpus_per_process",
        "no engine",
        "only processes that an engine starts use cpus_per_process",
        "pass Placement(engine='ray')",
    ),
    # Faults
    Refused(
        ("bad_nodes", "node in several processes", "min_hosts"),
        "no modules",
        "ExoGym cannot change, split or leave out the messages of a strategy without communication modules",
        "leave it out, or use a strategy that acts on rows (DDP, DiLoCo, FedAvg, SPARTA, ...)",
    ),
    Refused(
        ('balance="batch" or "steps"', "faults"),
        "its own clock",
        "in such a strategy no node waits for another, and slow nodes follow from its clock",
        "leave it out; dylu=True gives slow nodes fewer steps",
    ),
    Refused(
        ("stacked", "one node's strategy in processes"),
        "faults",
        "a strategy written for one node handles absent nodes only in one process and without stacked = True",
        "leave one of them out, or write the strategy as a CommunicationModule",
    ),
    Refused("trace", "planned faults", "both decide which nodes are absent", "pass only one of them"),
    Refused(
        "trace",
        "a server that samples no clients",
        "a trace lists the clients that a server can sample",
        "use a federated strategy such as FedAvg with client_fraction under 1, or plan faults with absent= or "
        "drop_rate=",
    ),
    # Nodes weighted by their work
    Refused(
        ('balance="steps"', "slow"),
        "gradients at every step",
        "in such a strategy all nodes take every step together",
        "leave it out, use balance='batch' or 'nodes', or use a strategy with local steps (DiLoCo, FedAvg, SPARTA)",
    ),
    Refused(
        'balance="batch" or "steps"',
        "its own mean",
        "nodes would be weighted by their work, and only the communicator's means (op='mean') apply those weights",
        "use balance='nodes', or SimpleReduce, DiLoCo, FedAvg, SPARTA or SPARTADiLoCo. If your own class averages only "
        "by the communicator's means, set weighted_means = True in it",
    ),
    # Time
    Refused(
        "trace",
        "no step_seconds",
        "which clients report in time depends on how long steps take",
        "pass the step time of a client at speed 1, for example step_seconds='50ms'",
    ),
    Refused(
        ("step_seconds", "timeline"),
        "no network",
        "virtual time needs a network",
        "pass network, for example network='1Gbps,0.5ms'",
    ),
    Refused(
        "its own clock",
        "network without step_seconds",
        "step times decide the order of events, and measured times would change it in every run",
        "pass step_seconds, for example step_seconds=0.1, or a list with each node's seconds",
    ),
    # Data
    Refused(
        "partitioner",
        ("data factory", "iterable data"),
        "a partitioner needs all examples at once, but a factory or an iterable yields them one after another",
        "leave partitioner out, or pass the whole data set",
    ),
    Refused(
        "factory of sampled clients",
        "no num_epochs or max_steps",
        "an epoch's length depends on all nodes' data, and a factory makes a client's data only when the client acts",
        "pass max_steps; or num_epochs, which makes all data once",
    ),
    Refused(
        "iterable data",
        "dataloader_kwargs except collate_fn",
        "the run's own process reads an iterable, so that the order does not depend on a number of workers",
        "leave them out. To prefetch, pass an iterable with its own workers, such as torchdata's "
        "StatefulDataLoader(dataset, batch_size=None, num_workers=2)",
    ),
    Refused(
        "one iterable for all nodes",
        ("its own clock", "nodes that rest", 'balance="steps"', "slow"),
        "nodes take different numbers of steps, so the examples of slow nodes would fill the memory",
        "pass a factory, (rank, num_nodes, is_train) -> iterable, so that each node reads its own",
    ),
    Refused(
        "iterable without a length",
        ("num_epochs", "no num_epochs or max_steps", "local_epochs"),
        "an epoch's length is unknown",
        "pass max_steps, H or local_steps instead, or the length: exogym.data.IterableData(dataset, length=...)",
    ),
    Refused(
        "iterables of unknown lengths",
        'weighting="examples"',
        "the nodes' numbers of examples are unknown",
        "pass weighting='uniform', or the lengths: exogym.data.IterableData(dataset, length=...)",
    ),
    Refused(
        "validation iterable without a length",
        "no val_size",
        "the evaluation might never end",
        "pass val_size, or the length: exogym.data.IterableData(dataset, length=...)",
    ),
    Refused(
        ("val_size", "val_interval"),
        "no val_dataset",
        "evaluations need a val_dataset",
        "pass a val_dataset to the trainer",
    ),
    # Checkpoints
    Refused(
        ("checkpoint_interval", "resume", "max_restarts", "client_state_memory"),
        "no save_dir",
        "checkpoints and the state of idle clients need a folder",
        "pass save_dir, or for checkpoints run_dir",
    ),
    Refused(
        "max_restarts",
        "lazy modules",
        "the model has no parameters yet from which a restart could begin",
        "run the model on one batch before fit, or leave max_restarts out",
    ),
    # Attached loops
    Refused(
        "attach",
        ("its own clock", "nodes that rest"),
        "your loops take every step on every node and cannot pause, and no virtual clock orders the steps",
        "use a strategy in which all nodes take all steps (DiLoCo with delay=), or train with LocalTrainer",
    ),
    # Hosts
    Refused(
        "min_hosts",
        "node",
        "the remaining hosts would have to split their models again",
        "leave min_hosts out, and pass retries= and a save_dir that all hosts share: if a host is lost, all restart "
        "from the last checkpoint",
    ),
    Refused(
        "min_hosts",
        ("faults", "network", "balance"),
        "faults, times and speeds can't be planned if hosts come and go",
        "leave one of them out",
    ),
    Refused(
        "min_hosts",
        "a second fit",
        "a host that comes back during a later fit would not know the earlier fits' results",
        "put each fit into its own script",
    ),
)
PAIRS = tuple((one, other, row) for row in REFUSED for one, other in row.pairs)
NAMES = frozenset(name for one, other, _ in PAIRS for name in (one, other)).union(UNTRIED)
