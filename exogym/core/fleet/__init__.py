"""The fleet: one matrix holds the parameters of N nodes in N rows. Each process holds some of the rows.

>>> import torch
>>> fleet = Fleet(torch.nn.Linear(3, 1), ranks=range(4), num_nodes=4, device=torch.device("cpu"))
>>> block: Block = fleet.blocks[0]
>>> block.params.shape, row_matrix(4, 4, torch.float32, torch.device("cpu")).shape
(torch.Size([4, 4]), torch.Size([4, 4]))
>>> layout: Layout = block.layout  # where each parameter lies in a row
>>> slots: tuple[Slot, ...] = layout.slots
>>> [(slot.name, slot.start, slot.stop) for slot in slots]
[('weight', 0, 3), ('bias', 3, 4)]
>>> layouts_of(torch.nn.Linear(3, 1)) == [layout]
True
"""

from exogym.core.fleet.fleet import Block, Fleet, row_matrix
from exogym.core.fleet.layout import Layout, Slot, layouts_of
from exogym.core.fleet.state import State, Stateful

__all__ = ["Block", "Fleet", "Layout", "Slot", "State", "Stateful", "layouts_of", "row_matrix"]
