"""Data: who owns which example, what each node sees at each step, and small real data sets."""

from exogym.data.bulk import BulkDataset, TokenWindows
from exogym.data.partition import (
    IID,
    ByKey,
    Dirichlet,
    LabelShards,
    Partitioner,
    QuantitySkew,
    labels_of,
    parse_partitioner,
)
from exogym.data.sources import Source, cifar10, digits, mnist, shakespeare, speakers
from exogym.data.stream import Stream

__all__ = [
    "IID",
    "BulkDataset",
    "ByKey",
    "Dirichlet",
    "LabelShards",
    "Partitioner",
    "QuantitySkew",
    "Source",
    "Stream",
    "TokenWindows",
    "cifar10",
    "digits",
    "labels_of",
    "mnist",
    "parse_partitioner",
    "shakespeare",
    "speakers",
]
