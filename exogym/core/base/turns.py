"""The order in which rows are sent between nodes if a node sends and receives one row at a time."""

from __future__ import annotations

from collections.abc import Iterable

Link = tuple[int, int]  # giver, taker


def turns_of(links: Iterable[Link]) -> list[list[Link]]:
    """Divide links into turns in which each node sends at most one row and receives at most one row.

    Each link is put into the first turn that has room, so pairs that swap rows need one turn, and d neighbors need at
    most 2 d - 1 turns, in most graphs d or d + 1.

    >>> turns_of([(0, 1), (1, 0), (2, 3), (3, 2)])
    [[(0, 1), (1, 0), (2, 3), (3, 2)]]
    >>> [len(turn) for turn in turns_of((i, (i + hop) % 4) for i in range(4) for hop in (1, 3))]
    [4, 4]
    """
    turns: list[list[Link]] = []
    gives, takes = dict[int, set[int]](), dict[int, set[int]]()  # a node to its turns
    for giver, taker in links:
        busy = gives.setdefault(giver, set()) | takes.setdefault(taker, set())
        first = next(k for k in range(len(busy) + 1) if k not in busy)
        if first == len(turns):
            turns.append([])
        turns[first].append((giver, taker))
        gives[giver].add(first)
        takes[taker].add(first)
    return turns
