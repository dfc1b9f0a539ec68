"""The table of features that cannot be combined: pairs, each with its reason and an alternative."""

from __future__ import annotations

from typing import NamedTuple

# What the features mean that are not named like an option ("delay"), a value (`compute="vmap"`) or a missing option
# ("no network").
PROPERTIES: dict[str, str] = {
    # of strategies
    'transport="ring" or "tree"': "`Averaging(transport=...)` with a route that sums values on the way",
    "tuner of p_sparta": "a budget that chooses SPARTA's share",
    "nothing to tune": "a strategy without the argument that a budget chooses",
    'compression_method="indices" or "topk"': "SPARTA's `compression_method=` other than `'random'`",
    "two kinds of steps": "a strategy that divides a round's steps between two models, or two parts of a model",
    "H as a function": "`H=` as a function of the round",
    "rounds of one length": "a strategy that plans its round in advance, such as Streaming DiLoCo or gossip",
    "rounds of different lengths": "`H=` as a function of the round, or chosen by a budget",
    "weights by examples": "`weighting='examples'` if nodes have unequal numbers of examples",
    "gradient_modules": "modules that act on the gradients of all nodes at every step",
    "corrections": "a module that corrects each node's own gradients",
    "nodes that rest": "clients that are sampled, or take fewer steps in a round than others",
    "packed values": "a strategy that sends packed values, indices or a node's own parameters, not only sums",
    "its own mean": "a strategy or module that computes means without the communicator (`weighted_means`)",
    "values right in the mean only": "a module that sends sparse entries or pieces of a mean, rounds by chance, or "
    "has error feedback (`right_in_mean`)",
    "acts_on left unsaid": "your own module without `acts_on`",
    "an outer optimizer of whole tensors": "`outer_optim=` that needs whole tensors, such as Muon",
    "its own clock": "a strategy whose nodes do not wait for each other",
    "gradients at every step": "a strategy whose nodes meet at every step",
    "no modules": "a strategy without modules: written for one node, or with its own clock",
    "a server that asks nobody": "a strategy without a server that samples clients",
    "stacked": "a strategy for one node with `stacked = True`",
    "one node's strategy in processes": "a strategy for one node in a run of several processes",
    # of the model and the data
    "buffers that change": "a model whose buffers change in training, such as BatchNorm's",
    "lazy modules": "a model with lazy modules that have no parameters yet",
    "data factory": "a factory instead of a data set",
    "factory of sampled clients": "a factory that makes sampled clients' data when they act",
    "iterable data": "training data that are an iterable, or a factory of iterables",
    "one iterable for all nodes": "an iterable as training data",
    "iterable without a length": "training data that are an iterable without a length",
    "iterables of unknown lengths": "a factory of iterables without a length",
    "validation iterable without a length": "a `val_dataset` that is an iterable without a length",
    # of the run
    "node in several processes": "`fit(node=NodeMesh(...))` with a process for each device, or `attach(node=...)`",
    "stages": "`fit(node=NodeMesh(stages=...))`",
    "no forks": "a device other than the CPU, or a system other than Linux",
    "processes of a launcher": "a script that torchrun, `python -m exogym.launch` or NetworkTrainer started",
    "dataloader_kwargs except collate_fn": "`fit(dataloader_kwargs=...)` with more than `collate_fn`",
    "no num_epochs or max_steps": "a fit without `num_epochs` and `max_steps`",
    'balance="batch" or "steps"': "`fit(balance=...)` that weights nodes by their work",
    "balance without speeds": "`fit(balance=...)` that measures speeds",
    "planned faults": "`Faults` with absent, lost, slow, bad_nodes, drop_rate, lost_rate or forget",
    "network without step_seconds": "`fit(network=...)` that measures step times",
    "save_dir of each host": "`fit(save_dir=...)` that is a different folder on each host",
    "attach": "`exogym.attach`, in a training loop of the user",
    "NetworkTrainer": "a run on the hosts of a hosts file",
    "a second fit": "a script that calls `fit` a second time",
}

# A strategy with `tried`, as each method of `exogym.contrib` has it, is refused with these features, except those that
# `tried` names. What every run has is not here: data, seeds, evaluation, checkpoints, processes, networks.
UNTRIED: tuple[str, ...] = (
    *("faults", "bad_nodes", "balance", 'compute="vmap"', 'precision="fp16"', 'on_nonfinite="skip"'),
    *("node", "node in several processes", "engine", "client_state_memory", "attach", "min_hosts"),
)


class Refused(NamedTuple):
    """Two features that cannot be combined, the reason, and what to do instead.

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
_PARTS = (
    "a split node computes step by step, in one process or in one process per device (under python -m exogym.launch)"
)

# Checked from the top: the first row whose two features a run has makes the error.
REFUSED: tuple[Refused, ...] = (
    # How means are taken
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
        ("robust", "secure_aggregation", "client_fraction", "privacy"),
        'transport="ring" or "tree"',
        "a server must see each node's values (rules, masks) or send the parameters to the next round's clients, which "
        "may not have averaged. This transport has no server, and sums values on the way",
        "leave transport out, or take 'server'",
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
        "leave robust out, or take 'norm_cap'",
    ),
    Refused(
        "robust",
        "values right in the mean only",
        "a rule compares the nodes' whole values. A median of mostly zeros is zero, and a node drops the values that "
        "it sent, so training stops. A rule over only the nodes that sent an entry would accept a bad node's entries "
        "unchanged",
        "leave robust out, or take 'norm_cap'",
    ),
    Refused(
        ("robust", "privacy"),
        ("weights by examples", 'balance="batch" or "steps"'),
        "a rule counts each node once, and privacy bounds each client's influence, so all weights must be equal",
        "give weighting='uniform', or balance='nodes'",
    ),
    Refused(
        "privacy",
        "buffers that change",
        "the buffers would be averaged without noise",
        "take a model without such buffers, for example with LayerNorm or GroupNorm instead of BatchNorm",
    ),
    # Options of strategies
    Refused(
        "gradient_modules",
        ("corrections", "nodes that rest"),
        "gradient modules take all nodes' gradients at every step and replace them. A correction needs each node's own "
        "gradient, and clients that are sampled or take fewer steps have none",
        "leave one of them out",
    ),
    Refused(
        ("personal", "two kinds of steps"),
        ("privacy", 'robust="norm_cap"'),
        "clipping and caps would count the movement of personal parameters, which are never sent",
        "leave one of them out, or take another rule, such as 'median'",
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
    # A node of several devices
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
        ("node in several processes", "min_hosts"),
        "max_memory_usage",
        "ExoGym measures a step's memory once, before a model is split and before another host joins",
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
        "the launcher or the hosts file decides where processes start, and how many",
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
        "give Placement(engine='ray')",
    ),
    # Faults
    Refused(
        "bad_nodes",
        "no modules",
        "bad nodes send wrong updates, and ExoGym cannot change this strategy's messages",
        "take a strategy that acts on rows (DDP, DiLoCo, FedAvg, SPARTA, ...), or leave bad_nodes out",
    ),
    Refused(
        ('balance="batch" or "steps"', "faults"),
        "its own clock",
        "in such a strategy no node waits for another, and its clock makes nodes slow",
        "leave it out; dylu=True gives slow nodes fewer steps",
    ),
    Refused(
        ("stacked", "one node's strategy in processes"),
        "faults",
        "a strategy written for one node handles absent nodes only in one process and without stacked = True",
        "leave one of them out, or write the strategy as a CommunicationModule",
    ),
    Refused("trace", "planned faults", "both decide which nodes are absent", "give one of them"),
    Refused(
        "trace",
        "a server that asks nobody",
        "a trace says which clients a server can ask",
        "take a federated strategy such as FedAvg with client_fraction under 1, or plan faults with absent= or "
        "drop_rate=",
    ),
    # Nodes weighted by their work
    Refused(
        ('balance="steps"', "slow"),
        "gradients at every step",
        "in such a strategy all nodes take every step together",
        "leave it out, use balance='batch' or 'nodes', or take a strategy with local steps (DiLoCo, FedAvg, SPARTA)",
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
    # Data
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
    Refused(
        "iterable without a length",
        ("num_epochs", "no num_epochs or max_steps", "local_epochs", "shard_sampling"),
        "an epoch's length is unknown",
        "give max_steps, H or local_steps instead, or the length: exogym.data.IterableData(dataset, length=...)",
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
    # Checkpoints
    Refused(
        ("checkpoint_interval", "resume", "max_restarts", "client_state_memory"),
        "no save_dir",
        "checkpoints and the state of idle clients need a folder",
        "give save_dir, or for checkpoints run_dir",
    ),
    Refused(
        "max_restarts",
        "lazy modules",
        "the model has no parameters yet with which a restart could begin",
        "run the model on one batch before fit, or leave max_restarts out",
    ),
    # Attached loops
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
    # Hosts
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
    Refused(
        "min_hosts",
        "a second fit",
        "a host that comes back during a later fit would not know the earlier fits' results",
        "put each fit into its own script",
    ),
)
