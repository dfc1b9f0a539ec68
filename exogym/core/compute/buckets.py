"""Average gradients bucket by bucket during the backward pass, like torch's DistributedDataParallel.

If a process holds one row and reduction="native", the process sends the last layers' gradients while it computes the
first layers' gradients. Buckets are column ranges of the gradient matrix. Every process sends the buckets in the same
order, from the last column to the first. A parameter without a gradient counts as zeros. The processes compare
afterward which parameters had gradients, so models with unused parameters need no option.
"""

from __future__ import annotations

from torch import Tensor

from exogym.core.compute.worker import Worker
from exogym.core.fleet import Block, Fleet


class Buckets:
    """Send the gradients of this process's only row, bucket by bucket, as soon as they are computed.

    Args:
        worker: the worker of this process. Its parameters get hooks, which `close` removes.
        fleet: a fleet with one row in this process and a wire that can sum in the background.
        bucket_bytes: a bucket's size in bytes. A block's last bucket may be smaller.
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
        """Send gradients during the next backward pass. Call `arm` before the last micro-batch's backward pass."""
        self.armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.slots)

    def finish(self) -> None:
        """Send the remaining buckets, with zeros for parameters without a gradient."""
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
    """A block's columns [start, stop), their slots, and the slots whose gradient is missing."""

    def __init__(self, block: Block, stop: int):
        self.block, self.start, self.stop = block, stop, stop
        self.slots: list[int] = []
        self.missing: set[int] = set()
