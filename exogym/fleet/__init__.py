"""The fleet: N nodes are one matrix with N rows, of which a process holds a block."""

from exogym.fleet.fleet import Block, Fleet, row_matrix
from exogym.fleet.state import State, Stateful

__all__ = ["Block", "Fleet", "State", "Stateful", "row_matrix"]
