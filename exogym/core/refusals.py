"""The table of what cannot be combined: features, and pairs of them, each with its reason and what to do instead."""

from __future__ import annotations

from typing import NamedTuple

# every feature that a row names, and what has it
FEATURES: dict[str, str] = {
    # options of strategies
    "privacy": "an averaging of clients with `privacy=DifferentialPrivacy(...)`",
    "robust": "`robust=` with a rule: a median, a trimmed mean or Krum",
    'robust="norm_cap"': "`robust=` with a cap on norms",
    "secure_aggregation": "`secure_aggregation=`",
    "transport": "`transport=` with any way",
    'transport="ring" or "tree"': "`transport=` with a way that adds up as it goes",
    "tuner": "`tuner=` with any tuner",
    'tuner="drift"': "a tuner that sees the drift of nodes",
    'tuner="autocorrelation"': "a tuner that sees the outer gradients",
    "tuner of outer_lr": "a tuner that chooses the outer rate",
    "tuner of p_sparta": "a tuner that chooses how much SPARTA sends",
    "nothing to tune": "a strategy that does not take what the tuner chooses",
    "outer_lr_scheduler": "`outer_lr_scheduler=`",
    'compression_method="indices" or "topk"': "SPARTA's `compression_method=` other than `'random'`",
    'rounding="stochastic"': "SPARTA's `rounding='stochastic'`",
    "no quantization_bits": "SPARTA without `quantization_bits=`, or with 32",
    "client_fraction": "`client_fraction=` under 1",
    "no client_fraction": "an averaging in which all clients act: `client_fraction=1`",
    "island_size": "`island_size=` of an averaging",
    "over_sampling, deadline_s or min_reports": "a server that asks more clients than it needs",
    "deadline_s": "`deadline_s=`",
    "local_steps": "`local_steps=`",
    "local_epochs": "`local_epochs=`",
    "H as a function": "`H=` as a function of the round",
    "rounds of one length": "a strategy that lays its round out beforehand: Streaming DiLoCo, DES-LOC, gossip",
    "rounds of different lengths": "`H=` as a function of the round, or chosen by a tuner",
    "weights by examples": "`weighting='examples'` over nodes of which some have more examples than others",
    "delay": "DiLoCo's `delay=`",
    "eager": "DiLoCo's `eager=True`",
    "island_H": "DiLoCo's `island_H=`",
    "activation": "`activation=` of asynchronous DiLoCo",
    "a rule without activation": "`rule=` of asynchronous DiLoCo other than `'delayed_nesterov'`",
    "H_v": "`H_v=` of DES-LOC",
    "no second moments": "an inner optimizer that keeps no second moments",
    # what strategies are like
    "gradient_modules": "modules that act on the gradients of all nodes at every step",
    "corrections": "a module that corrects each node's own gradients",
    "nodes that rest": "clients that are sampled, or take fewer steps than others of a round",
    "packed values": "a strategy that sends something else than sums: packed values, indices, a node's own parameters",
    "no all-reduce": "a strategy that never takes an all-reduce",
    "several modules": "a strategy of more than one module",
    "outer steps in parts or late": "`num_fragments=` over 1, or `delay=` or `fragment_sync_delay=` over 0",
    "its own mean": "a strategy or module whose means are not those of the communicator (`weighted_means`)",
    "parts of a mean": "a module that averages factors or shards only (`only_means`)",
    "values right in the mean only": "a module that sends sparse entries, rounds by chance, or has error feedback "
    "(`right_in_mean`)",
    "acts_on left unsaid": "a module of yours without `acts_on`",
    "an outer optimizer of whole tensors": "`outer_optim=` that looks at more than one element at a time, as Muon",
    "its own clock": "a strategy whose nodes do not wait for each other",
    "gradients at every step": "a strategy whose nodes meet at every step",
    "no modules": "a strategy that is not made of modules: written for one node, or with its own clock",
    "a server that asks nobody": "a strategy in which no server asks some of the nodes to take part",
    "stacked": "a strategy for one node with `stacked = True`",
    "one node's strategy in processes": "a strategy for one node in a run of several processes",
    # the model and the data
    "buffers that change": "a model whose buffers a training step changes, as BatchNorm's",
    "lazy modules": "a model with lazy modules that have no numbers yet",
    "data factory": "a factory in the place of a data set",
    "factory of sampled clients": "a factory that makes the data of sampled clients when they act",
    "no val_dataset": "a trainer without `val_dataset`",
    # options of fit
    "node": "`fit(node=NodeMesh(...))`",
    "node in several processes": "`fit(node=NodeMesh(...))` with a process for each device",
    "stages": "`fit(node=NodeMesh(stages=...))`",
    "compute": "`fit(compute=...)` but `compute='loop'`",
    'compute="vmap"': "`fit(compute='vmap')`",
    'compute="compiled" or "graphs"': "`fit(compute='compiled')` or `'graphs'`",
    'compute="graphs"': "`fit(compute='graphs')`",
    'compute="auto"': "`fit(compute='auto')`",
    "no CUDA": "a device that is no CUDA GPU",
    "processes": "`fit(processes=...)` but 1",
    "no forks": "a device other than the CPU, or a system other than Linux",
    "engine": "`fit(engine=...)`",
    "no engine": "a run without `engine=`",
    "cpus_per_process": "`fit(cpus_per_process=...)` but 1",
    "processes of a launcher": "a script that torchrun, `python -m exogym.launch` or NetworkTrainer started",
    'precision="fp16"': "`fit(precision='fp16')`",
    "minibatch_size": "`fit(minibatch_size=...)`",
    "gradient_accumulation": "`fit(gradient_accumulation=...)` over 1",
    "max_memory_usage": "`fit(max_memory_usage=...)`",
    "partitioner": "`fit(partitioner=...)`",
    "val_size": "`fit(val_size=...)`",
    "val_interval": "`fit(val_interval=...)`",
    "no num_epochs or max_steps": "a fit that says neither",
    "balance": "`fit(balance=...)` of any kind",
    'balance="nodes"': "`fit(balance='nodes')`",
    'balance="batch" or "steps"': "`fit(balance=...)` where nodes weigh what they have done",
    'balance="steps"': "`fit(balance='steps')`",
    "balance without speeds": "`fit(balance=...)` that measures how fast nodes are",
    "faults": "`fit(faults=...)` of any kind",
    "trace": "`faults=Faults(trace=...)`",
    "planned faults": "`Faults` with absent, lost, slow, bad_nodes, drop_rate, lost_rate or forget",
    "slow": "`faults=Faults(slow=...)`",
    "bad_nodes": "`faults=Faults(bad_nodes=...)`",
    "network": "`fit(network=...)`",
    "no network": "a run without `network=`",
    "network without step_seconds": "`fit(network=...)` that measures how long steps take",
    "step_seconds": "`fit(step_seconds=...)` where no server asks clients, so only the clock goes by it",
    "no step_seconds": "a run without `step_seconds=`",
    "timeline": "`fit(timeline=True)`",
    "speeds": "`compare(speeds=...)`",
    "target_loss": "`compare(target_loss=...)`",
    "checkpoint_interval": "`fit(checkpoint_interval=...)`",
    "resume": "`fit(resume=True)`",
    "max_restarts": "`fit(max_restarts=...)`",
    "client_state_memory": "`fit(client_state_memory=...)`",
    "no save_dir": "a run without `save_dir=`, and without checkpoints in its `run_dir`",
    "save_dir of each host": "`fit(save_dir=...)` that names another folder on each host",
    # hosts
    "NetworkTrainer": "a run on the hosts of a hosts file",
    "min_hosts": "`NetworkTrainer(min_hosts=...)`",
    "a second fit": "a script that calls `fit` a second time",
}


class Refused(NamedTuple):
    """Two features of `FEATURES` that cannot be combined, why, and what to do instead."""

    one: str
    other: str
    reason: str
    instead: str


_ONE_CHANGES_ALL = (
    "noise and epsilon are reckoned for a mean, which one client changes by at most C/(qN); a rule takes the value of "
    "one client or of a few, so one changes it by about C, and the reported epsilon would be false"
)
_NEEDS_MEAN = "a rule takes the place of means, and there is none here that it could take"
_PARTS = "one process or one for each device computes a node that is split over devices, step by step"
_OWN_MEANS = "nodes would weigh what they have done, and only the communicator's means (op='mean') know those weights"

_FOLDER = "checkpoints go to a folder"
_STEP_BY_STEP = "it computes the micro-batches of a step one after the other"
_OWN_SCALE = "fp16 scales each node's loss by itself"
_SPEEDS_LATE = "each node has its own processes there, and how fast it is shows only when the model is split"
_CHOSEN_ANEW = "a host that joins later must not choose anew"
_GIVE_SPEEDS = "give speeds, as in Balance('batch', speeds=[1, 2]), or leave it out"

# Rows are looked at from the top: the first that a run has both features of is what it says.
_MEANS: tuple[Refused, ...] = (
    Refused("privacy", "robust", _ONE_CHANGES_ALL, "leave one of them out"),
    Refused(
        "privacy",
        'robust="norm_cap"',
        "privacy clips each update to C itself, and a cap by the clients' norms would tell them without noise",
        "leave robust out, and lower clip",
    ),
    Refused(
        "privacy",
        "tuner",
        "a tuner reads what clients have moved, or how many took part, without noise, and publishes what it chooses; "
        "epsilon does not count that",
        "leave tuner out, and give H as a number or a function of the round",
    ),
    Refused(
        'tuner="drift"',
        "robust",
        "drift is measured around the mean of what nodes moved, and a rule puts something else in its place",
        "leave one of them out, or take a ByteBudget",
    ),
    Refused(
        'tuner="drift"',
        "secure_aggregation",
        "nodes add up how far each has moved without masks",
        "leave one of them out, or take a ByteBudget",
    ),
    *(
        Refused(feature, other, reason, "take a ByteBudget, or leave tuner out")
        for feature in ('tuner="drift"', 'tuner="autocorrelation"')
        for other, reason in (
            ("no all-reduce", "it goes by the mean that nodes take when they meet, and here they take none"),
            ("several modules", "it goes by the mean of one module, and would have to see which"),
        )
    ),
    Refused(
        'tuner="autocorrelation"',
        "outer steps in parts or late",
        "it goes by the mean of all outer gradients at once, where nodes meet",
        "take DiLoCo without delay, or leave tuner out",
    ),
    Refused(
        "tuner",
        "gradient_modules",
        "gradients meet at every step, whatever a tuner chooses, so it measures something else and keeps no budget",
        "leave tuner out, or take a strategy without gradient modules",
    ),
    Refused("privacy", "island_size", "privacy is of a server's mean, and islands have none", "leave island_size out"),
    Refused(
        "privacy",
        "over_sampling, deadline_s or min_reports",
        "epsilon counts clients that take part by chance alone, not by who is fast",
        "leave over_sampling, deadline_s and min_reports out",
    ),
    Refused(
        "robust",
        'transport="ring" or "tree"',
        "a rule needs the nodes' own values, and this transport adds them up on the way",
        "leave transport out, or take 'server'",
    ),
    Refused(
        "secure_aggregation",
        "robust",
        "the server sees nobody's own values, which a rule compares",
        "leave robust out",
    ),
    Refused(
        "secure_aggregation",
        'robust="norm_cap"',
        "the server sees nobody's own values, and a cap tells norms",
        "leave robust out",
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
        "a server that sees sums alone cannot hand on what others read",
        "leave secure_aggregation out",
    ),
    Refused("robust", "its own mean", _NEEDS_MEAN, "leave robust out, or take 'norm_cap'"),
    Refused("robust", "parts of a mean", _NEEDS_MEAN, "leave robust out, or take 'norm_cap'"),
    Refused(
        "robust",
        "values right in the mean only",
        "a median of mostly zeros is zero, and a node does not keep what it sent, so training stops; a rule over those "
        "alone who sent an entry would take a bad node's entries whole",
        "leave robust out, or take 'norm_cap'",
    ),
    Refused("transport", "no all-reduce", "only an all-reduce may go in several ways", "leave transport out"),
    *(
        Refused(
            feature,
            'transport="ring" or "tree"',
            "the clients of the next round get the parameters from a server, since they may not have been among those "
            "who averaged",
            f"leave transport out, or {feature}",
        )
        for feature in ("client_fraction", "privacy")
    ),
    Refused(
        "over_sampling, deadline_s or min_reports",
        "island_size",
        "a server that asks more clients than it needs takes one mean of those that report",
        "leave island_size out",
    ),
    *(
        Refused(feature, "weights by examples", reason, "give weighting='uniform'")
        for feature, reason in (
            ("robust", "a rule counts all nodes alike"),
            ("privacy", "privacy bounds what one client can change, and weights by examples would not"),
        )
    ),
    Refused(
        "privacy",
        "buffers that change",
        "their mean would be taken without noise",
        "take a model without them, for example with LayerNorm or GroupNorm instead of BatchNorm",
    ),
)
_OPTIONS: tuple[Refused, ...] = (
    Refused(
        "gradient_modules",
        "corrections",
        "gradient modules act on the gradients of all nodes at every step, and a correction on each node's own",
        "use one or the other",
    ),
    Refused(
        "gradient_modules",
        "nodes that rest",
        "gradient modules act on the gradients of all nodes at every step, and here nodes rest (client_fraction, "
        "privacy, local_steps, local_epochs)",
        "use one or the other",
    ),
    Refused("local_steps", "local_epochs", "both say how much a client works", "give one of them"),
    *(
        Refused(
            feature,
            "rounds of different lengths",
            "it is of rounds of one length",
            "give a number as H",
        )
        for feature in ("local_steps", "local_epochs", "delay", "island_H")
    ),
    Refused(
        "rounds of one length",
        "rounds of different lengths",
        "the strategy lays out beforehand what happens in a round",
        "give a number as H, without a tuner of H",
    ),
    Refused(
        "its own clock",
        "H as a function",
        "here rounds are each node's own",
        "give a number, and dylu=True for slow nodes to take fewer steps",
    ),
    Refused(
        "over_sampling, deadline_s or min_reports",
        "no client_fraction",
        "they are of a server that asks some of the clients",
        "give client_fraction under 1",
    ),
    Refused("eager", "delay", "eager=True waits a whole round for the average as it is", "leave one of them out"),
    Refused(
        "eager",
        "island_H",
        "eager=True has no moment at which an island's average could be told",
        "leave one of them out",
    ),
    Refused("activation", "a rule without activation", "it is of rule='delayed_nesterov'", "leave activation out"),
    Refused("H_v", "no second moments", "there are none to average", "take inner_optim='adamw', or leave H_v out"),
    Refused(
        'rounding="stochastic"',
        "no quantization_bits",
        "only quantised values are rounded",
        "give quantization_bits, such as 8",
    ),
    Refused("tuner", "nothing to tune", "it chooses an argument that this strategy does not take", "leave tuner out"),
    Refused("tuner", "H as a function", "it chooses H as it goes", "give the first H as a number"),
    Refused("tuner of outer_lr", "outer_lr_scheduler", "both set the outer rate", "give one of them"),
    Refused(
        "tuner of p_sparta",
        'compression_method="indices" or "topk"',
        "it goes through the indices in an order made for one share, and a tuner changes the share",
        "take compression_method='random'",
    ),
)
_SPLIT: tuple[Refused, ...] = (
    Refused("node", "compute", _PARTS, "leave compute out"),
    Refused("node", "processes", _PARTS + " (under python -m exogym.launch)", "leave processes out"),
    Refused("node", "engine", _PARTS + " (under python -m exogym.launch)", "leave engine out"),
    Refused(
        "stages",
        'precision="fp16"',
        "the scale of the loss is not known to the stages before it",
        "use 'bf16' or 'fp32'",
    ),
    Refused(
        "node in several processes",
        "secure_aggregation",
        "secure_aggregation looks at all of a node's row, of which each process has a part",
        "leave secure_aggregation out, or train in one process",
    ),
    Refused(
        "node in several processes",
        "max_memory_usage",
        "what a step takes is not known before the model is split",
        "give minibatch_size instead",
    ),
    Refused(
        "node in several processes",
        "no modules",
        "nobody knows whether it would do the same with a part of each parameter",
        "take a strategy that acts on rows (DDP, DiLoCo, FedAvg, SPARTA, ...), or leave node= out",
    ),
    Refused(
        "node in several processes",
        "acts_on left unsaid",
        "each process has a part of every parameter",
        'give the class acts_on = "elements" (any columns will do), "tensors" (whole parameters) or "row" (all of a '
        "node's)",
    ),
    Refused(
        "node in several processes",
        "an outer optimizer of whole tensors",
        "each process has a part of every tensor",
        "take one that treats each element by itself ('sgd', 'adam', ...)",
    ),
    *(
        Refused("node in several processes", feature, _SPEEDS_LATE, _GIVE_SPEEDS)
        for feature in ('balance="nodes"', "balance without speeds")
    ),
    Refused(
        "node in several processes",
        "save_dir of each host",
        "each process holds a part of its node's rows",
        "give a folder that all hosts share",
    ),
)
_COMPUTING: tuple[Refused, ...] = (
    *(
        Refused("its own clock", feature, "it takes its nodes one after another", "use compute='loop'")
        for feature in ('compute="vmap"', 'compute="compiled" or "graphs"')
    ),
    *(
        Refused(
            'compute="vmap"', feature, "rows are computed at once, each with all of its batch", "use compute='loop'"
        )
        for feature in ("minibatch_size", "gradient_accumulation", "max_memory_usage")
    ),
    *(
        Refused(feature, 'precision="fp16"', _OWN_SCALE, "use compute='loop', or 'bf16'")
        for feature in ('compute="vmap"', 'compute="compiled" or "graphs"')
    ),
    Refused('compute="graphs"', "no CUDA", "it replays CUDA graphs", "use compute='compiled' or 'loop'"),
    Refused(
        "processes",
        "processes of a launcher",
        "the processes that run this script share the nodes",
        "leave processes out",
    ),
    Refused("engine", "processes of a launcher", "it starts its processes itself", "leave out one"),
    Refused(
        "processes",
        "no forks",
        "processes are forked from this one, which is safe on Linux and on the CPU only",
        "leave it out, and start the script with python -m exogym.launch --nproc_per_node",
    ),
    Refused(
        "cpus_per_process", "no engine", "it is for processes that an engine starts elsewhere", "give engine='ray'"
    ),
)
_BALANCE: tuple[Refused, ...] = (
    Refused(
        'balance="batch" or "steps"',
        "its own clock",
        "there no node waits for another, and dylu=True gives slow nodes fewer steps",
        "leave balance out",
    ),
    Refused(
        'balance="steps"',
        "gradients at every step",
        "there every step is of all nodes together",
        "use balance='batch' or 'nodes', or a strategy with local steps (DiLoCo, FedAvg, SPARTA)",
    ),
    Refused(
        'balance="batch" or "steps"',
        "privacy",
        "epsilon counts each client alike, and one that weighs more than others changes the mean by more than C/(qN)",
        "use balance='nodes', or leave privacy out",
    ),
    Refused(
        'balance="batch" or "steps"',
        "robust",
        "a rule counts each node once, and these nodes weigh what they have done",
        "use balance='nodes', or leave robust out",
    ),
    Refused(
        'balance="batch" or "steps"',
        "its own mean",
        _OWN_MEANS,
        "use balance='nodes', or SimpleReduce, DiLoCo, FedAvg, SPARTA or SPARTADiLoCo. In a class of yours "
        "weighted_means = True says that all it averages are means of the communicator",
    ),
)
_FAULTS: tuple[Refused, ...] = (
    Refused(
        "bad_nodes",
        "no modules",
        "bad nodes send wrong updates, and what this strategy sends is its own",
        "take a strategy that acts on rows (DDP, DiLoCo, FedAvg, SPARTA, ...), or leave bad_nodes out",
    ),
    Refused(
        "its own clock",
        "faults",
        "slow nodes are slow on its clock, and it takes no planned faults",
        "leave faults out",
    ),
    *(
        Refused(
            feature,
            "faults",
            "a strategy written for one node can miss nodes in one process and without stacked = True only",
            "leave those out, or write it as a CommunicationModule",
        )
        for feature in ("stacked", "one node's strategy in processes")
    ),
    Refused(
        "slow",
        "gradients at every step",
        "slow nodes take fewer local steps, and here every step is of all nodes together",
        "leave slow out, or take a strategy with local steps (DiLoCo, FedAvg, SPARTA)",
    ),
    Refused("trace", "planned faults", "both say who is there", "give one of them"),
    Refused(
        "trace",
        "a server that asks nobody",
        "a trace says whom a server can ask",
        "take FedAvg or one of its kind with client_fraction under 1, or plan faults with absent= or drop_rate=",
    ),
)
_TIME: tuple[Refused, ...] = (
    *(
        Refused(
            feature,
            "no step_seconds",
            "who reports in time depends on how long steps take",
            "give fit step_seconds, as step_seconds='50ms', of a client at speed 1",
        )
        for feature in ("trace", "deadline_s")
    ),
    *(
        Refused(
            feature,
            "no network",
            "it is of the clock, which goes by a network",
            "give network, for example network='1Gbps,0.5ms'",
        )
        for feature in ("step_seconds", "timeline", "speeds", "target_loss")
    ),
    Refused(
        "its own clock",
        "network without step_seconds",
        "it goes by how long steps take, and measured times would give another order each time",
        "give step_seconds, for example step_seconds=0.1, or a list with each node's",
    ),
)
_DATA: tuple[Refused, ...] = (
    Refused(
        "partitioner",
        "data factory",
        "a factory already decides what each node gets",
        "give the whole data set, or leave out partitioner",
    ),
    Refused(
        "factory of sampled clients",
        "no num_epochs or max_steps",
        "how long an epoch is depends on the data of all nodes, which are not made before they act",
        "give max_steps; or num_epochs, which makes them all once",
    ),
    *(
        Refused(feature, "no val_dataset", "it is of evaluations", "give the trainer a val_dataset")
        for feature in ("val_size", "val_interval")
    ),
)
_SAVING: tuple[Refused, ...] = (
    *(
        Refused(feature, "no save_dir", _FOLDER, "give save_dir, or run_dir")
        for feature in ("checkpoint_interval", "resume", "max_restarts")
    ),
    Refused("client_state_memory", "no save_dir", "what is over it goes to a folder", "give save_dir"),
    Refused(
        "max_restarts",
        "lazy modules",
        "there are no numbers yet to start again from",
        "give the lazy modules of the model one batch before fit, or leave max_restarts out",
    ),
)
_HOSTS: tuple[Refused, ...] = (
    Refused(
        "engine",
        "NetworkTrainer",
        "it has hosts of its own",
        "give it to LocalTrainer, without a hosts file",
    ),
    Refused("processes", "NetworkTrainer", "the hosts file says how many there are", "leave processes out"),
    Refused(
        "min_hosts",
        "node",
        "those that remain would have to split their models anew",
        "leave min_hosts out, and give retries= and a save_dir that all hosts share: all start again from the last "
        "checkpoint when one is lost",
    ),
    Refused(
        "min_hosts",
        "no modules",
        "going on without lost nodes needs a strategy of communication modules",
        "leave min_hosts out, or take DiLoCo, FedAvg, SPARTA, DDP, ...",
    ),
    Refused(
        "min_hosts", "faults", "hosts that are lost and come back are the faults of such a run", "leave one of them out"
    ),
    Refused(
        "min_hosts", "network", "it predicts times, and here hosts come and go when they do", "leave one of them out"
    ),
    Refused(
        "min_hosts",
        "balance",
        "how fast nodes are is measured once, for the hosts of the start",
        "leave one of them out",
    ),
    Refused("min_hosts", "max_memory_usage", _CHOSEN_ANEW, "give minibatch_size instead"),
    Refused("min_hosts", 'compute="auto"', _CHOSEN_ANEW, "use compute='loop' or 'vmap'"),
    Refused(
        "min_hosts",
        "a second fit",
        "who comes back in the middle of a later fit could not know what came of the earlier ones",
        "put each into a script of its own",
    ),
)
GROUPS = {
    "How means are taken": _MEANS,
    "Options of strategies": _OPTIONS,
    "A node of several devices": _SPLIT,
    "Computing, and processes": _COMPUTING,
    "Nodes that weigh what they have done": _BALANCE,
    "Faults": _FAULTS,
    "Time": _TIME,
    "Data": _DATA,
    "Checkpoints": _SAVING,
    "Hosts": _HOSTS,
}
REFUSED: tuple[Refused, ...] = tuple(row for rows in GROUPS.values() for row in rows)
