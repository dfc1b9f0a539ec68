"""Gradients averaged bucket by bucket while backward still runs, as torch's DistributedDataParallel does.

Where a process holds one row and reduces natively, the sum over nodes of the last layers' gradients can travel while
the first layers' are still computed. Buckets are column ranges of the gradient matrix, from the end to the front, and
leave in that order on every process. A parameter that got no gradient counts as zeros; whether any node had one is
asked afterwards, so unused parameters need no option.
"""

from __future__ import annotations

from torch import Tensor

from exogym.core.compute.worker import Worker
from exogym.core.fleet import Block, Fleet


class Buckets:
    """Sends the gradients of the one row here as they come.

    Args:
        worker: its parameters get the hooks; `close` removes them.
        fleet: of one row here, with a wire that can begin a sum.
        bucket_bytes: a bucket leaves when it holds so much, or the last columns of a block.
    """

    def __init__(self, worker: Worker, fleet: Fleet, bucket_bytes: int):
        self.fleet, self.armed, self._next = fleet, False, 0
        self.buckets: list[_Bucket] = []
        self._places: dict[int, tuple[_Bucket, int]] = {}
        parameters = iter(worker.parameters)
        ids = [[id(next(parameters)) for _ in block.layout] for block in fleet.blocks]
        for block, mine in zip(reversed(fleet.blocks), reversed(ids), strict=True):
            bucket = _Bucket(block, block.layout.numel)
            for index in reversed(range(len(mine))):
                if (bucket.stop - bucket.start) * block.layout.dtype.itemsize >= bucket_bytes:
                    self.buckets.append(bucket)
                    bucket = _Bucket(block, bucket.start)
                bucket.start = block.layout.slots[index].start
                bucket.slots.append(index)
                self._places[mine[index]] = (bucket, index)
            self.buckets.append(bucket)
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in worker.parameters]

    def arm(self) -> None:
        """Send what the next backward gives; called before that of the last micro-batch."""
        self.armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.slots)

    def finish(self) -> None:
        """Send what is left: buckets with parameters that got no gradient, zeros in their place."""
        self.armed = False
        for bucket in self.buckets:
            grads, has_grad = bucket.block.grads, bucket.block.has_grad
            assert grads is not None
            for index in bucket.slots:
                has_grad[0, index] = index not in bucket.missing
                if index in bucket.missing:
                    bucket.block.layout.slots[index].of(grads[0]).zero_()
        self._send(len(self.buckets))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, p: Tensor) -> None:
        if not self.armed:
            return
        bucket, index = self._places[id(p)]
        assert bucket.block.grads is not None and p.grad is not None
        bucket.block.layout.slots[index].of(bucket.block.grads[0]).copy_(p.grad)
        bucket.missing.discard(index)
        ready = self._next
        while ready < len(self.buckets) and not self.buckets[ready].missing:
            ready += 1
        self._send(ready)

    def _send(self, until: int) -> None:
        for bucket in self.buckets[self._next : until]:
            assert bucket.block.grads is not None
            self.fleet.comm.begin_mean(bucket.block.grads, bucket.start, bucket.stop)
        self._next = max(self._next, until)


class _Bucket:
    """The columns [start, stop) of a block, the slots in them, and those whose gradient has not come yet."""

    def __init__(self, block: Block, stop: int):
        self.block, self.start, self.stop = block, stop, stop
        self.slots: list[int] = []
        self.missing: set[int] = set()
