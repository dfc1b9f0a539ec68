"""The table of features that cannot be combined: pairs, each with its reason and an alternative."""

from __future__ import annotations

from typing import NamedTuple

# every feature in the table, and the code or setting that has it
FEATURES: dict[str, str] = {
    # options of strategies
    "privacy": "federated averaging with `Averaging(privacy=...)`",
    "robust": "`Robust(strategy, ...)` with a rule, such as a median, a trimmed mean or Krum",
    'robust="norm_cap"': "`Robust(strategy, ...)` with a cap on norms",
    "secure_aggregation": "`Secure(strategy)`",
    'transport="ring" or "tree"': "`Averaging(transport=...)` with a route that sums values on the way",
    "tuner": "`ByteBudget(strategy, ...)`",
    "tuner of p_sparta": "a budget that chooses SPARTA's share",
    "nothing to tune": "a strategy without the argument that a budget chooses",
    'compression_method="indices" or "topk"': "SPARTA's `compression_method=` other than `'random'`",
    'rounding="stochastic"': "SPARTA's `rounding='stochastic'`",
    "no quantization_bits": "SPARTA without `quantization_bits=`, or with 32",
    "client_fraction": "`client_fraction=` under 1",
    "island_size": "`island_size=` of an averaging strategy",
    "personal": "personal parameters, as with `Averaging(personal=...)`",
    "two kinds of steps": "a strategy that divides a round's steps between two models, or two parts of a model",
    "local_steps": "`local_steps=`",
    "local_epochs": "`local_epochs=`",
    "H as a function": "`H=` as a function of the round",
    "rounds of one length": "a strategy that plans its round in advance, such as Streaming DiLoCo or gossip",
    "rounds of different lengths": "`H=` as a function of the round, or chosen by a budget",
    'weighting="examples"': "`weighting='examples'` of an averaging strategy",
    "weights by examples": "`weighting='examples'` if nodes have unequal numbers of examples",
    "delay": "DiLoCo's `delay=`",
    "eager": "DiLoCo's `eager=True`",
    "island_H": "DiLoCo's `island_H=`",
    # properties of strategies
    "gradient_modules": "modules that act on the gradients of all nodes at every step",
    "corrections": "a module that corrects each node's own gradients",
    "nodes that rest": "clients that are sampled, or take fewer steps in a round than others",
    "packed values": "a strategy that sends packed values, indices or a node's own parameters, not only sums",
    "its own mean": "a strategy or module that computes means without the communicator (`weighted_means`)",
    "values right in the mean only": "a module that sends sparse entries or pieces of a mean, rounds by chance, or "
    "has error feedback (`right_in_mean`)",
    "acts_on left unsaid": "your own module without `acts_on`",
    "an outer optimizer of whole tensors": "`outer_optim=` that needs whole tensors, such as Muon",
    "shard_sampling": "`shard_sampling=True` of asynchronous DiLoCo",
    "its own clock": "a strategy whose nodes do not wait for each other",
    "gradients at every step": "a strategy whose nodes meet at every step",
    "no modules": "a strategy without modules: written for one node, or with its own clock",
    "a server that asks nobody": "a strategy without a server that samples clients",
    "stacked": "a strategy for one node with `stacked = True`",
    "one node's strategy in processes": "a strategy for one node in a run of several processes",
    # the model and the data
    "buffers that change": "a model whose buffers change in training, such as BatchNorm's",
    "lazy modules": "a model with lazy modules that have no parameters yet",
    "data factory": "a factory instead of a data set",
    "factory of sampled clients": "a factory that makes sampled clients' data when they act",
    "no val_dataset": "a trainer without `val_dataset`",
    "iterable data": "training data that are an iterable, or a factory of iterables",
    "one iterable for all nodes": "an iterable as training data",
    "iterable without a length": "training data that are an iterable without a length",
    "iterables of unknown lengths": "a factory of iterables without a length",
    "validation iterable without a length": "a `val_dataset` that is an iterable without a length",
    # options of fit
    "node": "`fit(node=NodeMesh(...))`",
    "node in several processes": "`fit(node=NodeMesh(...))` with a process for each device, or `attach(node=...)`",
    "stages": "`fit(node=NodeMesh(stages=...))`",
    "compute": "`fit(compute=...)` except `compute='loop'`",
    'compute="vmap"': "`fit(compute='vmap')`",
    "processes": "`fit(processes=...)` except 1",
    "no forks": "a device other than the CPU, or a system other than Linux",
    "engine": "`Placement(engine=...)`",
    "no engine": "a run without `engine=`",
    "cpus_per_process": "`Placement(cpus_per_process=...)` except 1",
    "processes of a launcher": "a script that torchrun, `python -m exogym.launch` or NetworkTrainer started",
    'precision="fp16"': "`fit(precision='fp16')`",
    'on_nonfinite="skip"': "`fit(on_nonfinite='skip')`",
    "minibatch_size": "`fit(minibatch_size=...)`",
    "gradient_accumulation": "`fit(gradient_accumulation=...)` over 1",
    "max_memory_usage": "`fit(max_memory_usage=...)`",
    "partitioner": "`fit(partitioner=...)`",
    "dataloader_kwargs except collate_fn": "`fit(dataloader_kwargs=...)` with more than `collate_fn`",
    "num_epochs": "`fit(num_epochs=...)`",
    "no val_size": "a fit without `val_size`",
    "val_size": "`fit(val_size=...)`",
    "val_interval": "`fit(val_interval=...)`",
    "no num_epochs or max_steps": "a fit without `num_epochs` and `max_steps`",
    "balance": "`fit(balance=...)` of any kind",
    'balance="nodes"': "`fit(balance='nodes')`",
    'balance="batch" or "steps"': "`fit(balance=...)` that weights nodes by their work",
    'balance="steps"': "`fit(balance='steps')`",
    "balance without speeds": "`fit(balance=...)` that measures speeds",
    "faults": "`fit(faults=...)` of any kind",
    "trace": "`faults=Faults(trace=...)`",
    "planned faults": "`Faults` with absent, lost, slow, bad_nodes, drop_rate, lost_rate or forget",
    "slow": "`faults=Faults(slow=...)`",
    "bad_nodes": "`faults=Faults(bad_nodes=...)`",
    "network": "`fit(network=...)`",
    "no network": "a run without `network=`",
    "network without step_seconds": "`fit(network=...)` that measures step times",
    "step_seconds": "`fit(step_seconds=...)` without client sampling, so that only the clock uses it",
    "no step_seconds": "a run without `step_seconds=`",
    "timeline": "`fit(timeline=True)`",
    "speeds": "`compare(speeds=...)`",
    "checkpoint_interval": "`fit(checkpoint_interval=...)`",
    "resume": "`fit(resume=True)`",
    "max_restarts": "`Placement(max_restarts=...)`",
    "client_state_memory": "`Placement(client_state_memory=...)`",
    "no save_dir": "a run without `save_dir=` and without checkpoints in its `run_dir`",
    "save_dir of each host": "`fit(save_dir=...)` that is a different folder on each host",
    # a loop of the user
    "attach": "`exogym.attach`, in a training loop of the user",
    # hosts
    "NetworkTrainer": "a run on the hosts of a hosts file",
    "min_hosts": "`NetworkTrainer(min_hosts=...)`",
    "a second fit": "a script that calls `fit` a second time",
}

# A strategy with `tried`, as each method of `exogym.contrib` has it, is refused with these features, except those that
# `tried` names. What every run has is not here: data, seeds, evaluation, checkpoints, processes, networks.
UNTRIED: tuple[str, ...] = (
    *("faults", "bad_nodes", "balance", 'compute="vmap"', 'precision="fp16"', 'on_nonfinite="skip"'),
    *("node", "node in several processes", "engine", "client_state_memory", "attach", "min_hosts"),
)


class Refused(NamedTuple):
    """Two names in `FEATURES` that cannot be combined, the reason, and what to do instead.

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


_ONE_CHANGES_ALL = (
    "noise and epsilon assume a mean, which one client changes by at most C/(qN), for clip=C and qN clients in a "
    "round. A rule takes the values of one or a few clients, so one client changes the result by about C, and the "
    "reported epsilon would be false"
)
_NEEDS_MEAN = "a rule replaces a mean, and this strategy has no mean that a rule could replace"
_PARTS = (
    "a split node computes step by step, in one process or in one process per device (under python -m exogym.launch)"
)
_OWN_MEANS = "nodes would be weighted by their work, and only the communicator's means (op='mean') apply those weights"

_CHOSEN_ANEW = "a host that joins later would choose this setting again, perhaps differently"

# Checked from the top: the first row whose two features a run has makes the error.
_MEANS: tuple[Refused, ...] = (
    Refused("privacy", "robust", _ONE_CHANGES_ALL, "leave one of them out"),
    Refused(
        "privacy",
        'robust="norm_cap"',
        "privacy clips each update to C itself, and a cap from the clients' norms would reveal them without noise",
        "leave robust out, and lower clip",
    ),
    Refused(
        "privacy",
        "tuner",
        "the budget reads the number of clients without noise, and publishes its choice. Epsilon does not count that",
        "leave ByteBudget out, and give H as a number or a function of the round",
    ),
    Refused(
        "tuner",
        "gradient_modules",
        "gradients are sent at every step whatever H is, so the budget cannot be kept",
        "leave ByteBudget out, or take a strategy without gradient modules",
    ),
    Refused(
        "privacy", "island_size", "privacy needs a server's mean, and islands have no server", "leave island_size out"
    ),
    Refused(
        "robust",
        'transport="ring" or "tree"',
        "a rule needs each node's values, and this transport sums them on the way",
        "leave transport out, or take 'server'",
    ),
    Refused(
        "secure_aggregation",
        'transport="ring" or "tree"',
        "masked values go through a server",
        "leave transport out",
    ),
    Refused(
        "secure_aggregation",
        "packed values",
        "the server sees sums only, so it cannot pass on one node's values to others",
        "leave secure_aggregation out",
    ),
    Refused("robust", "its own mean", _NEEDS_MEAN, "leave robust out, or take 'norm_cap'"),
    Refused(
        "robust",
        "values right in the mean only",
        "a rule compares the nodes' whole values. A median of mostly zeros is zero, and a node drops the values that "
        "it sent, so training stops. A rule over only the nodes that sent an entry would accept a bad node's entries "
        "unchanged",
        "leave robust out, or take 'norm_cap'",
    ),
    *(
        Refused(
            feature,
            'transport="ring" or "tree"',
            "the next round's clients may not have averaged in this round, so they need a server that sends them the "
            "parameters",
            f"leave transport out, or {feature}",
        )
        for feature in ("client_fraction", "privacy")
    ),
    *(
        Refused(feature, "weights by examples", reason, "give weighting='uniform'")
        for feature, reason in (
            ("robust", "a rule weights all nodes equally"),
            ("privacy", "privacy bounds each client's influence, and weights by examples would exceed the bound"),
        )
    ),
    Refused(
        "privacy",
        "buffers that change",
        "the buffers would be averaged without noise",
        "take a model without such buffers, for example with LayerNorm or GroupNorm instead of BatchNorm",
    ),
)
_OPTIONS: tuple[Refused, ...] = (
    Refused(
        "gradient_modules",
        "corrections",
        "gradient modules replace all nodes' gradients at every step, and a correction needs each node's own gradient",
        "leave one of them out",
    ),
    Refused(
        "gradient_modules",
        "nodes that rest",
        "gradient modules need all nodes' gradients at every step, and here some nodes rest (client_fraction, "
        "privacy, local_steps, local_epochs)",
        "leave one of them out",
    ),
    Refused(
        "personal",
        "privacy",
        "clipping would count the movement of parameters that are never sent",
        "leave one of them out",
    ),
    Refused(
        "personal",
        'robust="norm_cap"',
        "the cap would count and shorten the movement of parameters that are never sent",
        "take another rule, such as 'median'",
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
        "leave it out, and give H",
    ),
    Refused(
        'robust="norm_cap"',
        "two kinds of steps",
        "the cap would compare a node's shared model with its personal model",
        "take another rule, such as 'median'",
    ),
    Refused("local_steps", "local_epochs", "both set a client's number of steps", "give one of them"),
    Refused(
        ("local_steps", "local_epochs", "delay", "island_H", "rounds of one length"),
        "rounds of different lengths",
        "a round's steps are planned in advance, which needs rounds of one length",
        "give a number as H, without a ByteBudget",
    ),
    Refused(
        "its own clock",
        "H as a function",
        "each node has its own rounds",
        "give H as a number; dylu=True lets slow nodes take fewer steps",
    ),
    Refused(
        "eager",
        ("delay", "island_H"),
        "eager=True already waits a whole round for the average, and has no moment for another one",
        "leave one of them out",
    ),
    Refused(
        'rounding="stochastic"',
        "no quantization_bits",
        "only quantized values are rounded",
        "give quantization_bits, such as 8",
    ),
    Refused("tuner", "nothing to tune", "the strategy has no such argument", "leave ByteBudget out"),
    Refused("tuner", "H as a function", "the budget chooses H during the run", "give the first H as a number"),
    Refused(
        "tuner of p_sparta",
        'compression_method="indices" or "topk"',
        "this method orders the indices for one fixed share, and the budget changes the share",
        "take compression_method='random'",
    ),
)
_SPLIT: tuple[Refused, ...] = (
    Refused("node", ("compute", "processes", "engine"), _PARTS, "leave compute, processes and engine out"),
    Refused(
        "stages",
        'precision="fp16"',
        "the earlier stages do not know the loss's scale",
        "use 'bf16' or 'fp32'",
    ),
    Refused(
        "node in several processes",
        "secure_aggregation",
        "secure_aggregation needs a node's whole row, and each process has only a part",
        "leave secure_aggregation out, or train in one process",
    ),
    Refused(
        "node in several processes",
        "max_memory_usage",
        "a step's memory is not known before the model is split",
        "give minibatch_size instead",
    ),
    Refused(
        "node in several processes",
        "no modules",
        "ExoGym cannot know whether the strategy would compute the same on a part of each parameter",
        "take a strategy that acts on rows (DDP, DiLoCo, FedAvg, SPARTA, ...), or leave node= out",
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
        "an outer optimizer of whole tensors",
        "each process has a part of every tensor",
        "take an optimizer that treats each element separately ('sgd', 'adam', ...)",
    ),
    Refused(
        "node in several processes",
        ('balance="nodes"', "balance without speeds"),
        "each node has its own processes, so a node's speed is known only after the model is split",
        "give speeds, as in Balance('batch', speeds=[1, 2]), or leave balance out",
    ),
    Refused(
        "node in several processes",
        "save_dir of each host",
        "each process holds a part of its node's rows",
        "give a folder that all hosts share",
    ),
)
_COMPUTING: tuple[Refused, ...] = (
    Refused(
        'compute="vmap"',
        ("minibatch_size", "gradient_accumulation", "max_memory_usage", "its own clock"),
        "vmap computes all rows at once, each with its whole batch",
        "use compute='loop'",
    ),
    Refused(
        'compute="vmap"', 'precision="fp16"', "fp16 scales each node's loss separately", "use compute='loop', or 'bf16'"
    ),
    Refused(
        ("processes", "engine"),
        "processes of a launcher",
        "the launched processes share the nodes already",
        "leave processes and engine out",
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
        "give Placement(engine='ray')",
    ),
)
_BALANCE: tuple[Refused, ...] = (
    Refused(
        'balance="batch" or "steps"',
        "its own clock",
        "in such a strategy no node waits for another",
        "leave balance out; dylu=True gives slow nodes fewer steps",
    ),
    Refused(
        'balance="steps"',
        "gradients at every step",
        "in such a strategy all nodes take every step together",
        "use balance='batch' or 'nodes', or a strategy with local steps (DiLoCo, FedAvg, SPARTA)",
    ),
    Refused(
        'balance="batch" or "steps"',
        "privacy",
        "epsilon counts each client equally, and a client with more weight changes the mean by more than C/(qN), for "
        "clip=C and qN clients in a round",
        "use balance='nodes', or leave privacy out",
    ),
    Refused(
        'balance="batch" or "steps"',
        "robust",
        "a rule counts each node once, and balance weights nodes by their work",
        "use balance='nodes', or leave robust out",
    ),
    Refused(
        'balance="batch" or "steps"',
        "its own mean",
        _OWN_MEANS,
        "use balance='nodes', or SimpleReduce, DiLoCo, FedAvg, SPARTA or SPARTADiLoCo. If your own class averages only "
        "by the communicator's means, set weighted_means = True in it",
    ),
)
_FAULTS: tuple[Refused, ...] = (
    Refused(
        "bad_nodes",
        "no modules",
        "bad nodes send wrong updates, and ExoGym cannot change this strategy's messages",
        "take a strategy that acts on rows (DDP, DiLoCo, FedAvg, SPARTA, ...), or leave bad_nodes out",
    ),
    Refused(
        "its own clock",
        "faults",
        "such a strategy takes no planned faults; its clock makes nodes slow",
        "leave faults out",
    ),
    Refused(
        ("stacked", "one node's strategy in processes"),
        "faults",
        "a strategy written for one node handles absent nodes only in one process and without stacked = True",
        "leave one of them out, or write the strategy as a CommunicationModule",
    ),
    Refused(
        "slow",
        "gradients at every step",
        "slow nodes take fewer local steps, and here all nodes take every step together",
        "leave slow out, or take a strategy with local steps (DiLoCo, FedAvg, SPARTA)",
    ),
    Refused("trace", "planned faults", "both decide which nodes are absent", "give one of them"),
    Refused(
        "trace",
        "a server that asks nobody",
        "a trace says which clients a server can ask",
        "take a federated strategy such as FedAvg with client_fraction under 1, or plan faults with absent= or "
        "drop_rate=",
    ),
)
_TIME: tuple[Refused, ...] = (
    Refused(
        "trace",
        "no step_seconds",
        "which clients report in time depends on how long steps take",
        "give fit the step time of a client at speed 1, for example step_seconds='50ms'",
    ),
    Refused(
        ("step_seconds", "timeline", "speeds"),
        "no network",
        "virtual time needs a network",
        "give network, for example network='1Gbps,0.5ms'",
    ),
    Refused(
        "its own clock",
        "network without step_seconds",
        "step times decide the order of events, and measured times would change it in every run",
        "give step_seconds, for example step_seconds=0.1, or a list with each node's seconds",
    ),
)
_DATA: tuple[Refused, ...] = (
    Refused(
        "partitioner",
        "data factory",
        "a factory already decides each node's data",
        "give the whole data set, or leave out partitioner",
    ),
    Refused(
        "factory of sampled clients",
        "no num_epochs or max_steps",
        "an epoch's length depends on all nodes' data, and a factory makes a client's data only when the client acts",
        "give max_steps; or num_epochs, which makes all data once",
    ),
    Refused(
        "iterable data",
        "partitioner",
        "a partitioner needs all examples at once, and an iterable gives them one after another",
        "leave partitioner out, or give a factory that returns an iterable for each node",
    ),
    Refused(
        "iterable data",
        "dataloader_kwargs except collate_fn",
        "the run's own process reads an iterable, so that the order does not depend on a number of workers",
        "leave them out. To read ahead, give an iterable with its own workers, such as torchdata's "
        "StatefulDataLoader(dataset, batch_size=None, num_workers=2)",
    ),
    Refused(
        "one iterable for all nodes",
        ("its own clock", "nodes that rest", 'balance="steps"', "slow"),
        "nodes take different numbers of steps, so the examples of slow nodes would fill the memory",
        "give a factory, (rank, num_nodes, is_train) -> iterable, so that each node reads its own",
    ),
    *(
        Refused(
            "iterable without a length",
            features,
            "an epoch's length is unknown",
            f"{instead}, or give the length: exogym.data.IterableData(dataset, length=...)",
        )
        for features, instead in (
            (("num_epochs", "no num_epochs or max_steps"), "give max_steps"),
            ("local_epochs", "give H or local_steps instead"),
            ("shard_sampling", "leave it out"),
        )
    ),
    Refused(
        "iterables of unknown lengths",
        'weighting="examples"',
        "the nodes' numbers of examples are unknown",
        "give weighting='uniform', or the lengths: exogym.data.IterableData(dataset, length=...)",
    ),
    Refused(
        "validation iterable without a length",
        "no val_size",
        "the evaluation might never end",
        "give val_size, or the length: exogym.data.IterableData(dataset, length=...)",
    ),
    Refused(
        ("val_size", "val_interval"),
        "no val_dataset",
        "evaluations need a val_dataset",
        "give the trainer a val_dataset",
    ),
)
_SAVING: tuple[Refused, ...] = (
    Refused(
        ("checkpoint_interval", "resume", "max_restarts"),
        "no save_dir",
        "checkpoints need a folder",
        "give save_dir, or run_dir",
    ),
    Refused("client_state_memory", "no save_dir", "state beyond the limit goes to a folder", "give save_dir"),
    Refused(
        "max_restarts",
        "lazy modules",
        "the model has no parameters yet with which a restart could begin",
        "run the model on one batch before fit, or leave max_restarts out",
    ),
)
_ATTACHED: tuple[Refused, ...] = (
    Refused(
        "attach",
        "its own clock",
        "each process takes its steps when its own loop does, and no virtual clock orders them",
        "simulate it with LocalTrainer, or take a strategy whose nodes wait for each other (DiLoCo with delay=)",
    ),
    Refused(
        "attach",
        "nodes that rest",
        "your loop takes every step on every node, and could not rest",
        "take a strategy in which all nodes take all steps, or train with LocalTrainer or NetworkTrainer",
    ),
)
_HOSTS: tuple[Refused, ...] = (
    Refused(
        ("processes", "engine"),
        "NetworkTrainer",
        "the hosts file says where processes start, and how many",
        "leave processes and engine out, or train with LocalTrainer",
    ),
    Refused(
        "min_hosts",
        "node",
        "the remaining hosts would have to split their models again",
        "leave min_hosts out, and give retries= and a save_dir that all hosts share: if a host is lost, all start "
        "again from the last checkpoint",
    ),
    Refused(
        "min_hosts",
        "no modules",
        "only a strategy of communication modules can continue without lost nodes",
        "leave min_hosts out, or take DiLoCo, FedAvg, SPARTA, DDP, ...",
    ),
    Refused(
        "min_hosts",
        ("faults", "network", "balance"),
        "nobody can plan faults, times and speeds where hosts come and go",
        "leave one of them out",
    ),
    Refused("min_hosts", "max_memory_usage", _CHOSEN_ANEW, "give minibatch_size instead"),
    Refused(
        "min_hosts",
        "a second fit",
        "a host that comes back during a later fit would not know the earlier fits' results",
        "put each fit into its own script",
    ),
)
GROUPS = {
    "How means are taken": _MEANS,
    "Options of strategies": _OPTIONS,
    "A node of several devices": _SPLIT,
    "Computing, and processes": _COMPUTING,
    "Nodes weighted by their work": _BALANCE,
    "Faults": _FAULTS,
    "Time": _TIME,
    "Data": _DATA,
    "Checkpoints": _SAVING,
    "Attached loops": _ATTACHED,
    "Hosts": _HOSTS,
}
REFUSED: tuple[Refused, ...] = tuple(row for rows in GROUPS.values() for row in rows)
