"""Collectives that return their result and don't change their argument.

All processes must make the same calls in the same order. Before each call they exchange a description of it (160 bytes
per process), so a wrong call raises an error on all processes instead of hanging or returning wrong numbers.

Results have no gradient. NCCL needs CUDA tensors; gloo and MPI copy tensors on a GPU through the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.base.devices import CPU
from exogym.errors import ArgumentError, check_count
from exogym.machines.distributed import bare
from exogym.machines.distributed.bare import ReduceOp, check_operation
from exogym.machines.distributed.group import GroupError, get_world_size, require_group

KINDS = ("barrier", "broadcast", "reduce", "all_reduce", "scatter", "gather", "all_gather", "reduce_scatter", "send")
OPERATIONS = tuple(ReduceOp)
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
)
MOST_DIMENSIONS = 15


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Return the tensor of process `src` on every process. All processes must pass the same shape and dtype.

    Every process except `src` receives tensor.nbytes bytes.

    >>> from exogym.distributed import destroy_process_group, init_process_group
    >>> init_process_group("gloo", world_size=1)
    >>> broadcast(torch.tensor([1.0, 2.0]), src=0)
    tensor([1., 2.])
    >>> destroy_process_group()
    """
    with _call("broadcast", tensor, src) as note:
        x = note.copy()
        dist.broadcast(bare.as_bytes(x), src)
        return note.result(x)


def all_reduce(tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM) -> Tensor:
    """Return, on every process, the reduction of all processes' tensors by `op`, such as their sum.

    With a ring, each of the n processes sends 2 (n - 1)/n tensor.nbytes bytes.
    """
    with _call("all_reduce", tensor, op=op) as note:
        return note.result(bare.all_reduce_(note.copy(), note.operation))


def reduce(tensor: Tensor, dst: int = 0, op: ReduceOp | str = ReduceOp.SUM) -> Tensor | None:
    """Reduce all processes' tensors with `op`. Return the result on process `dst`, and None on the others."""
    with _call("reduce", tensor, dst, op=op) as note:
        x = note.copy()
        dist.reduce(x, dst, bare.SENT_AS[note.operation])
        return note.result(bare.averaged(x, note.operation)) if note.rank == dst else None


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return, on every process, the list of all processes' tensors in rank order.

    Each of the n processes receives (n - 1) tensor.nbytes bytes.
    """
    with _call("all_gather", tensor) as note:
        return [note.result(part) for part in bare.all_gather_(note.copy())]


def gather(tensor: Tensor, dst: int = 0) -> list[Tensor] | None:
    """Return the list of all processes' tensors, in rank order, on process `dst`, and None on the other processes."""
    with _call("gather", tensor, dst) as note:
        x = note.copy()
        parts = bare.alike(x) if note.rank == dst else []
        dist.gather(bare.as_bytes(x), [bare.as_bytes(part) for part in parts] or None, dst)
        return [note.result(part) for part in parts] or None


def scatter(tensors: Sequence[Tensor] | None = None, src: int = 0) -> Tensor:
    """Return, on each process, its tensor from the list `tensors` that process `src` passes.

    The list has one tensor per process, all with the same shape and dtype. The other processes pass None.
    """
    require_group("scatter")
    here = dist.get_rank() == src
    if not here and tensors is not None:
        raise ArgumentError(f"scatter: only rank {src} (src) may pass tensors: pass None on rank {dist.get_rank()}")
    parts = list(tensors) if tensors is not None else []
    if here:
        _check_parts(parts)
    with _call("scatter", parts[0] if here else None, src) as note:
        shape, dtype = _shape_of(note.compare(3)[src])  # only the sender knows the tensor
        out = torch.empty(shape, dtype=dtype, device=bare.device())
        dist.scatter(bare.as_bytes(out), [bare.as_bytes(_ready(part)) for part in parts] if here else None, src)
        return note.result(out)


def reduce_scatter(tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM) -> Tensor:
    """Return this process's part of the reduction of all processes' tensors by `op`, such as their sum.

    The first dimension is divided evenly over the processes. Each of the n processes sends (n - 1)/n tensor.nbytes
    bytes.

    Raises:
        ArgumentError: the size of the first dimension is not a multiple of the world size.
    """
    with _call("reduce_scatter", tensor, op=op) as note:
        size = note.world_size
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise ArgumentError(
                f"reduce_scatter: the first dimension of {tuple(tensor.shape)} cannot be divided among {size} "
                f"processes: pad it to a multiple of {size}"
            )
        return note.result(bare.reduce_scatter_(note.copy(), note.operation))


def send(tensor: Tensor, dst: int) -> None:
    """Send a tensor, its shape and its dtype to process `dst`, which must call `recv` with this process's rank."""
    with _call("send", tensor, dst) as note:
        note.check_peer(dst)
        bare.send(note.words(), dst)
        if tensor.numel():
            bare.send(note.copy(), dst)


def recv(src: int) -> Tensor:
    """Return the tensor that process `src` sends with `send(tensor, dst)`. The result is on the backend's device."""
    with _call("recv", None, src) as note:
        note.check_peer(src)
        words = torch.empty(len(note.words()), dtype=torch.int64, device=bare.device())
        shape, dtype = _shape_of(bare.receive_(words, src).tolist())
        out = torch.empty(shape, dtype=dtype, device=bare.device())
        return bare.receive_(out, src) if out.numel() else out


def barrier() -> None:
    """Wait until all processes have called `barrier`."""
    with _call("barrier", None):
        pass  # comparing the notes waits for all processes


class _Note:
    """A process's description of its next call: kind, tensor, root and operation."""

    def __init__(self, kind: str, tensor: Tensor | None, root: int | None, op: ReduceOp | str | None):
        require_group(kind)
        self.kind, self.root = kind, root
        self.rank, self.world_size = dist.get_rank(), get_world_size()
        if kind not in ("barrier", "recv", "scatter") or tensor is not None:
            _check_tensor(kind, tensor)
        if root is not None:
            check_count("src" if kind in ("broadcast", "scatter", "recv") else "dst", root, 0)
            if root >= self.world_size:
                raise ArgumentError(
                    f"{kind}: rank {root} is too large for {self.world_size} processes: ranks start at 0"
                )
        self.tensor = tensor
        self.operation = ReduceOp.SUM
        if op is not None and tensor is not None:
            self.operation = check_operation(op, tensor.dtype)

    def copy(self) -> Tensor:
        assert self.tensor is not None
        return _ready(self.tensor, copy=True)

    def result(self, x: Tensor) -> Tensor:
        """Return the result `x` on the device of the tensor that the caller gave."""
        return x if self.tensor is None else x.to(self.tensor.device)

    def words(self) -> Tensor:
        """Return the description of this call as a tensor of whole numbers, which the processes exchange."""
        kind = KINDS.index("send" if self.kind == "recv" else self.kind)
        words = [kind, OPERATIONS.index(self.operation), -1 if self.root is None else self.root]
        if self.tensor is None:
            words += [-1, 0]
        else:
            words += [DTYPES.index(self.tensor.dtype), self.tensor.dim(), *self.tensor.shape]
        words += [0] * (5 + MOST_DIMENSIONS - len(words))
        return torch.tensor(words, dtype=torch.int64, device=bare.device())

    def compare(self, count: int | None = None) -> list[list[int]]:
        """Exchange the descriptions of the call, and return them by rank.

        Raise ArgumentError on all processes if the first `count` words differ. None: all words.
        """
        notes = [words.tolist() for words in bare.all_gather_(self.words())]
        if any(words[:count] != notes[0][:count] for words in notes):
            calls = "; ".join(f"rank {rank} called {_text(words)}" for rank, words in enumerate(notes))
            raise ArgumentError(
                f"{self.kind}: the processes made different calls: {calls}; all must make the same call"
            )
        return notes

    def check_peer(self, peer: int) -> None:
        if peer == self.rank:
            raise ArgumentError(f"{self.kind}: rank {peer} is this process: pass another rank")


@contextlib.contextmanager
def _call(
    kind: str, tensor: Tensor | None, root: int | None = None, op: ReduceOp | str | None = None
) -> Iterator[_Note]:
    """Yield a call's note once all processes make the call. Torch's errors inside become GroupErrors with the rank."""
    note = _Note(kind, tensor, root, op)
    try:
        with torch.no_grad():
            if kind not in ("scatter", "send", "recv"):  # here not all processes know the tensor
                note.compare()
            yield note
    except GroupError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"{kind} failed on rank {note.rank} of {note.world_size}: another process may have ended; see its "
            f"output. Torch's error: {error}"
        ) from None


def _ready(x: Tensor, copy: bool = False) -> Tensor:
    """Return `x` contiguous, on the backend's device, without gradient. If `copy`, never return `x` itself."""
    there = x.detach().to(bare.device()).contiguous()
    return there.clone() if copy and there.data_ptr() == x.data_ptr() else there


def _check_tensor(kind: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        cure = ": convert with torch.as_tensor" if type(x).__module__ == "numpy" else ""
        raise ArgumentError(f"{kind}: expected a torch tensor, got a {type(x).__name__}{cure}")
    if x.layout != torch.strided:
        raise ArgumentError(f"{kind}: expected a dense tensor, got a sparse one ({x.layout}): use .to_dense()")
    if x.dtype not in DTYPES:
        raise ArgumentError(f"{kind}: tensors of {x.dtype} cannot be sent: convert them, for example with .float()")
    if x.dim() > MOST_DIMENSIONS:
        raise ArgumentError(f"{kind}: expected at most {MOST_DIMENSIONS} dimensions, got {x.dim()}: flatten the tensor")
    place = bare.device()
    if place != CPU and x.device.type != place.type:
        sends = f"{dist.get_backend()} sends {place.type} tensors"
        raise ArgumentError(f"{kind}: {sends}, but got one on {x.device}: use .to({place.type!r}), or backend='gloo'")


def _check_parts(parts: list[Any]) -> None:
    size = dist.get_world_size()
    if len(parts) != size:
        raise ArgumentError(f"scatter: expected one tensor per process, {size}, but got {len(parts)}")
    for part in parts:
        _check_tensor("scatter", part)
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise ArgumentError(
                f"scatter: all tensors must have the same dtype and shape, got {parts[0].dtype} "
                f"{tuple(parts[0].shape)} and {part.dtype} {tuple(part.shape)}"
            )


def _shape_of(words: list[int]) -> tuple[list[int], torch.dtype]:
    return words[5 : 5 + words[4]], DTYPES[words[3]]


def _text(words: list[int]) -> str:
    """Return a note as the text of its call."""
    kind, given = KINDS[words[0]], []
    if words[3] >= 0:
        shape, dtype = _shape_of(words)
        given.append(f"{str(dtype).removeprefix('torch.')} {tuple(shape)}")
    if words[2] >= 0:
        given.append(f"{'src' if kind in ('broadcast', 'scatter') else 'dst'}={words[2]}")
    if "reduce" in kind:
        given.append(f"op={OPERATIONS[words[1]].value!r}")
    return f"{kind}({', '.join(given)})"
