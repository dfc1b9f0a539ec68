"""The code blocks of the two founding documents, as they were written there, run.

Only names that the documents leave undefined are put in (`YourModel`, `load_your_data`, `Net`, `datasets`,
`optim_spec`, ...), and a device that is not here is exchanged for the one that is. The blocks of the first document
build on each other, so they run in one name space, in their order.
"""

import copy
import hashlib
import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.logger import Logger
from exogym.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.testing import fingerprint

FRAMEWORK = {
    "Simple DiLoCo Training": """
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy

# Your model and data
model = YourModel()
train_dataset, val_dataset = load_your_data()

# Create trainer
trainer = LocalTrainer(model, train_dataset, val_dataset)

# Configure DiLoCo strategy (communicate every 100 steps)
strategy = DiLoCoStrategy(
    inner_optim='adamw',  # Local optimizer
    outer_optim='sgd',    # Global optimizer
    H=100,                # Communication interval
    lr=3e-4
)

# Train with 4 simulated nodes
final_model = trainer.fit(
    strategy=strategy,
    num_nodes=4,
    num_epochs=10,
    batch_size=32,
    device='cuda'  # or 'mps' for Apple Silicon
)
""",
    "Federated Learning with Islands": """
from exogym.strategy import FedAvgStrategy

# Federated learning with 4-node islands
strategy = FedAvgStrategy(
    inner_optim='sgd',
    island_size=4,        # Create islands of 4 nodes
    H=5,                  # Local training steps before averaging
    lr=0.01
)

trainer.fit(
    strategy=strategy,
    num_nodes=16,         # 16 total nodes = 4 islands
    num_epochs=20
)
""",
    "Bandwidth-Constrained Training with SPARTA": """
from exogym.strategy import SPARTAStrategy

# Extreme bandwidth reduction (0.1% of parameters per round)
strategy = SPARTAStrategy(
    p_sparta=0.001,       # Communicate 0.1% of parameters
    inner_optim='adamw',
    lr=1e-4
)

trainer.fit(
    strategy=strategy,
    num_nodes=8,
    num_epochs=15
)
""",
    "Research with DeMo Algorithm": """
from exogym.strategy import DeMoStrategy

# Advanced gradient compression research
strategy = DeMoStrategy(
    compression_decay=0.999,    # Residual accumulation rate
    compression_topk=32,        # Frequency components to transmit
    compression_chunk=64,       # DCT chunk size
    weight_decay=1e-4
)

trainer.fit(strategy=strategy, num_nodes=4)
""",
    "Modular Communication Framework": """
from exogym.strategy import CommunicateOptimizeStrategy
from exogym.strategy.sparta import SparseCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator

# Compose multiple communication strategies
sparse_comm = SparseCommunicator(sparsification_rate=0.01)
averaging_comm = AveragingCommunicator(island_size=4)

# Create custom hybrid strategy
strategy = CommunicateOptimizeStrategy(
    communication_modules=[sparse_comm, averaging_comm],
    inner_optim='adamw'
)
""",
    "Apple Silicon (MPS) Support": """
# Automatic MPS optimization with CPU fallback
trainer.fit(
    strategy=strategy,
    device='mps',          # Uses Apple Silicon GPU when possible
    num_nodes=4
)
""",
    "Comprehensive Logging & Monitoring": """
from exogym.logger import WandbLogger, CSVLogger

# Multiple logging backends
logger = WandbLogger(
    project="distributed_training_research",
    experiment_name="diloco_vs_sparta_comparison"
)

# Automatic metrics tracking
trainer.fit(
    strategy=strategy,
    logger=logger,
    log_interval=50      # Log every 50 steps
)
""",
    "Strategy Configuration": """
# Fine-tuned DiLoCo for large language models
strategy = DiLoCoStrategy(
    inner_optim='adamw',
    outer_optim='sgd',
    H=200,                    # Higher H for better bandwidth efficiency
    inner_lr=1e-4,           # Conservative inner learning rate
    outer_lr=0.5,            # Aggressive outer learning rate
    max_norm=1.0,            # Gradient clipping
    lr_scheduler='cosine',   # Learning rate scheduling
    warmup_steps=1000
)
""",
    "Custom Strategy Development": """
from exogym.strategy import Strategy

class MyCustomStrategy(Strategy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # Custom initialization
        
    def step(self):
        # Custom communication and optimization logic
        self.communicate_gradients()
        self.update_parameters()
        super().step()  # Handle LR scheduling
        
    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        # Node-specific setup
""",
    "Dataset Integration": '''
# Automatic dataset sharding
def dataset_factory(rank, num_nodes, train_dataset):
    """Create per-node dataset with automatic sharding."""
    full_dataset = load_full_dataset()
    
    # Shard dataset across nodes
    indices = list(range(rank, len(full_dataset), num_nodes))
    return torch.utils.data.Subset(full_dataset, indices)

trainer = LocalTrainer(
    model=model,
    train_dataset=dataset_factory,  # Function instead of dataset
    val_dataset=val_dataset
)
''',
    "Memory Optimization": """
# Memory-efficient training configuration
trainer.fit(
    strategy=strategy,
    batch_size=32,           # Optimal batch size per node
    gradient_accumulation=4, # Simulate larger batches
    max_memory_usage=0.8     # Limit memory usage to 80%
)
""",
    "Communication Optimization": """
# Bandwidth-optimized SPARTA configuration
strategy = SPARTAStrategy(
    p_sparta=0.005,          # 0.5% of parameters
    compression_method='topk', # Top-K sparsification
    quantization_bits=8      # 8-bit quantization
)
""",
    "Hardware-Specific Tuning": """
# Apple Silicon optimization
if torch.backends.mps.is_available():
    strategy = DiLoCoStrategy(H=50)  # Lower H for MPS
else:
    strategy = DiLoCoStrategy(H=200) # Higher H for CUDA
""",
}  # fmt: skip

TECHNICAL = """
# Create model and datasets
model = Net()
train_dataset = datasets.MNIST('./data', train=True, download=True)
test_dataset = datasets.MNIST('./data', train=False)

# Create trainer
trainer = LocalTrainer(model, train_dataset, test_dataset)

# Create strategy
strategy = FedAvgStrategy(inner_optim=optim_spec, H=5)

# Train with 3 nodes
trainer.fit(num_epochs=2, strategy=strategy, num_nodes=3, device="cpu")
"""


class YourModel(nn.Module):
    """Returns its own loss, and its logits beside."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, batch):
        x, y = batch
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def load_your_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1344, 6, generator=g)
    y = (x.sum(1) > 0).long()
    return TensorDataset(x[:1280], y[:1280]), TensorDataset(x[1280:], y[1280:])


def here(block):
    """Exchange a device that is not here for the one that is."""
    if not torch.cuda.is_available():
        block = block.replace("device='cuda'", "device='cpu'")
    if not torch.backends.mps.is_available():
        block = block.replace("device='mps'", "device='cpu'")
    return block


class FakeWandb(types.ModuleType):
    """Enough of wandb to be logged to, with no account and no network."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.run, self.records, self.given, self.summary = None, [], {}, {}

    def init(self, **given):
        self.given, self.run = given, self
        return self

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, record):
        self.records.append(record)

    def finish(self):
        self.run = None


def run(names, scope):
    for name in names:
        exec(compile(here(FRAMEWORK[name]), name, "exec"), scope)
    return scope


@pytest.fixture
def scope(tmp_path, monkeypatch):
    """The name space, in a folder of its own: what a block writes is seen."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    train, _ = load_your_data()
    return {
        "__name__": "document",
        "torch": torch,
        "YourModel": YourModel,
        "load_your_data": load_your_data,
        "load_full_dataset": lambda: train,
    }


def losses(trainer):
    found = [row["val_loss"] for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    return found[0], found[-1]


NAMES = list(FRAMEWORK)
DILOCO, FEDAVG, SPARTA, DEMO, MODULAR, MPS, LOGGING, TUNED, CUSTOM, DATA, MEMORY, TOPK, HARDWARE = NAMES


def test_the_blocks_that_train_one_after_the_other(scope):
    """DiLoCo, FedAvg, SPARTA, DeMo, the composition on Apple's device, and a factory in little memory."""
    run([DILOCO], scope)
    trainer = scope["trainer"]
    assert scope["final_model"] is scope["model"] is trainer.model
    assert (trainer.history[-1]["step"], trainer.description["num_nodes"]) == (100, 4)
    before, after = losses(trainer)
    assert after < before
    expected = {FEDAVG: (16, 60), SPARTA: (8, 75), DEMO: (4, 10)}
    for name, (nodes, steps) in expected.items():
        mark = fingerprint(trainer.model)
        run([name], scope)
        assert (trainer.description["num_nodes"], trainer.history[-1]["step"]) == (nodes, steps)
        assert fingerprint(trainer.model) != mark and losses(trainer)[1] < before
    run([MODULAR, MPS], scope)
    assert trainer.description["strategy"]["name"] == "CommunicateOptimizeStrategy"
    assert [m["name"] for m in trainer.description["strategy"]["communication_modules"]] == [
        "SparseCommunicator", "AveragingCommunicator",
    ]  # fmt: skip
    run([DATA, MEMORY], scope)
    assert scope["trainer"] is not trainer
    assert scope["trainer"].history[-1]["step"] == 1280 // (32 * 4)
    assert scope["trainer"].description["gradient_accumulation"] == 4
    assert list(Path.cwd().iterdir()) == []  # without logger and save_dir no file is written


def test_the_factory_shards_as_the_document_says(scope):
    """Node r gets every 4th example from the r-th, so in order it is the data set dealt out."""
    train, val = load_your_data()
    scope |= {"model": YourModel(), "val_dataset": val, "LocalTrainer": LocalTrainer}
    run([DATA], scope)
    options = {"num_nodes": 4, "max_steps": 5, "device": "cpu", "shuffle": False}
    dealt = LocalTrainer(copy.deepcopy(scope["model"]), train, val)
    for trainer in (scope["trainer"], dealt):
        trainer.fit(SimpleReduceStrategy("sgd", lr=0.1), **options)
    assert fingerprint(scope["trainer"].model) == fingerprint(dealt.model)


def test_the_logging_block(scope, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    scope |= {"trainer": LocalTrainer(YourModel(), *load_your_data()), "strategy": SimpleReduceStrategy()}
    run([LOGGING], scope)
    assert isinstance(scope["logger"], Logger)
    assert fake.given["project"] == "distributed_training_research"
    assert fake.given["name"] == "diloco_vs_sparta_comparison"
    assert [record["step"] for record in fake.records] == [0, 40]  # an epoch of 40 steps, none divisible by 50
    assert fake.summary["val_loss"] == fake.records[-1]["val_loss"] and fake.run is None


def test_the_blocks_that_only_configure_also_train(scope):
    scope |= {"DiLoCoStrategy": DiLoCoStrategy, "SPARTAStrategy": SPARTAStrategy}
    train, val = load_your_data()
    run([CUSTOM], scope)
    assert issubclass(scope["MyCustomStrategy"], Strategy)  # which is DDP: test_node_strategies.py
    for name in (TUNED, TOPK, HARDWARE):
        run([name], scope)
        trainer = LocalTrainer(YourModel(), train, val)
        trainer.fit(scope["strategy"], num_nodes=2, max_steps=200, batch_size=4, device="cpu")
        assert trainer.history[-1]["step"] == 200 and trainer.history[-1]["tx_bytes"] > 0
        given = trainer.description["strategy"]
        if name == TUNED:
            assert (given["H"], given["outer_lr"], given["max_norm"], given["warmup_steps"]) == (200, 0.5, 1.0, 1000)
        if name == TOPK:
            assert (given["compression_method"], given["quantization_bits"]) == ("topk", 8)


class Net(nn.Module):
    """The technical document's model, which returns its loss from a batch of images and digits."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(28 * 28, 10)

    def forward(self, batch):
        images, digits = batch
        return F.cross_entropy(self.out(images.flatten(1)), digits)


class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train, download=False):
        self.count = 576 if train else 40

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = torch.zeros(1, 28, 28)
        image[0, index % 10] = 1.0
        return image, index % 10


@pytest.mark.parametrize(
    "optim_spec", [OptimSpec(torch.optim.AdamW, lr=1e-2), OptimSpec("sgd", lr=0.1), "adamw", torch.optim.Adam], ids=str
)
def test_the_technical_document(optim_spec):
    scope = {
        "Net": Net,
        "datasets": types.SimpleNamespace(MNIST=MNIST),
        "LocalTrainer": LocalTrainer,
        "FedAvgStrategy": FedAvgStrategy,
        "optim_spec": optim_spec,
    }
    exec(compile(TECHNICAL, "technical document", "exec"), scope)
    trainer = scope["trainer"]
    assert (trainer.history[-1]["step"], trainer.description["num_nodes"]) == (12, 3)
    before, after = losses(trainer)
    assert after < before


def test_the_blocks_are_as_written():
    """The SHA-256 of the documents' Python blocks, one after the other: none has been made to fit the code."""
    blocks = "".join(block.removeprefix("\n") for block in [*FRAMEWORK.values(), TECHNICAL])
    assert hashlib.sha256(blocks.encode()).hexdigest() == (
        "88c1cab80c76c48f88a0e6067bbe1047b84ea8bfd51ac680d45ff69defbc8bf8"
    )
