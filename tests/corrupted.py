"""Damaged and forged binary files for tests: seeded mutations, and what a reader may do with such a file.

A reader refuses a file with one of ExoGym's errors, in one line, or reads it. It never takes over `PATIENCE_S` seconds,
starts no program, connects nowhere, and opens only files of the folder (and of the installed packages).
"""

import contextlib
import os
import random
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from exogym.errors import ExoGymError, ModelError

T = TypeVar("T")
PATIENCE_S = 10
FEW, MANY = 100, 2000  # mutations of a file in the fast tests and in the slow ones
EXTREMES = (0, 1, 2, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 512, 2**64 - 1)
RUNS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn",
        "socket.connect", "socket.bind", "webbrowser.open")  # fmt: skip
# What Python and its packages open by themselves.
ALLOWED = tuple(
    {os.path.realpath(place) for place in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())}
    | {str(Path(__file__).parents[1]), "/proc", "/sys", "/dev", "/etc", "/usr", "/lib"}
)
_watching: list[list[tuple[str, Any]]] = []


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if _watching and (event == "open" or event in RUNS):
        _watching[-1].append((event, given[0] if given else None))


_installed: list[bool] = []


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Raise AssertionError if the block starts a program, connects somewhere, or opens a file outside `folder`."""
    if not _installed:
        sys.addaudithook(_hook)  # it stays for good
        _installed.append(True)
    seen: list[tuple[str, Any]] = []
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)
    for event, what in seen:
        assert event == "open", f"{event} of {what!r}"
        if isinstance(what, str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(what))
            assert path.startswith((str(folder) + os.sep, str(folder), *ALLOWED)), f"{path} was opened"


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Raise AssertionError if the block takes over `PATIENCE_S` seconds, also if the block's code catches that."""
    rang: list[int] = []

    def late(number: int, frame: Any) -> None:
        rang.append(number)
        raise AssertionError(f"not done after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        assert not rang, f"not done after {PATIENCE_S} s"


def read_or_refused(read: Callable[[], T], folder: Path) -> tuple[str, T | None]:
    """Return ("read", the value of `read()`), or ("refused", None) if it raised one of ExoGym's errors, in one line."""
    try:
        with watched(folder), impatient():
            return "read", read()
    except ExoGymError as error:
        assert isinstance(error, ModelError) or "\n" not in str(error), str(error)  # a ModelError has a list
        assert str(folder) in str(error), str(error)
        return "refused", None


def mutated(draw: random.Random, data: bytes, hot: Sequence[range] = ()) -> bytes:
    """Return `data` with one change, in two of three cases in one of the ranges `hot`."""
    if not data:
        return draw.randbytes(9)
    where = draw.choice(hot) if hot and draw.random() < 0.67 else range(len(data))
    at, found = draw.choice(where), bytearray(data)
    kind = draw.choice(["flip", "flip", "flip", "byte", "number", "number", "cut", "insert", "delete", "zeros", "copy"])
    if kind == "flip":
        found[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        found[at] = draw.randrange(256)
    elif kind == "number":
        size = draw.choice([1, 2, 4, 8])
        at -= at % size
        value = draw.choice(EXTREMES) % (1 << 8 * size)
        found[at : at + size] = value.to_bytes(size, draw.choice(["little", "big"]))
    elif kind == "cut":
        del found[at:]
    elif kind == "insert":
        found[at:at] = draw.randbytes(draw.randint(1, 64))
    elif kind == "delete":
        del found[at : at + draw.randint(1, 64)]
    elif kind == "zeros":
        end = min(len(found), at + draw.randint(1, 600))
        found[at:end] = bytes(end - at)
    elif kind == "copy":
        start = draw.choice(where)
        piece = found[start : start + draw.randint(1, 600)]
        found[at : at + len(piece)] = piece
    return bytes(found)


def write_gguf(path: Path) -> Path:
    """Write a small random model of Llama with a vocabulary of bytes as a GGUF file; return its path."""
    import gguf
    import numpy as np

    from exogym.models.pretrained import byte_tokenizer

    end, width = "<|endoftext|>", 16
    known = byte_tokenizer([end], "language").get_vocab()
    words = [*sorted(known, key=known.__getitem__), "th", "the"]
    numbers, out = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    out.add_name("small")
    out.add_block_count(1)
    out.add_context_length(32)
    out.add_embedding_length(width)
    out.add_feed_forward_length(width)
    out.add_head_count(2)
    out.add_head_count_kv(1)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(len(words))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_types([1] * 256 + [3, 1, 1])
    out.add_token_merges(["t h", "th e"])
    out.add_eos_token_id(words.index(end))
    shapes = {"token_embd": (len(words), width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width, width) for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{name}": (width // 2, width) for name in ("attn_k", "attn_v")}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        out.add_tensor(f"{name}.weight", numbers.standard_normal(shape).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
