"""Files of tokens: written from a folder of texts, and read through memory maps."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from corrupted import impatient
from processes import everywhere
from torch.utils.data import Subset

from exogym import LocalTrainer
from exogym.data import TokenFiles, TokenWindows, tokenize_folder
from exogym.data.bulk import bulk_take
from exogym.errors import ArgumentError, DataError
from exogym.models.gpt import CharGPT
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint

TEXTS = {"b.txt": "or not", "a.txt": "To be", "deep/c.txt": "that ïs", "notes.md": "no text"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text, encoding="utf-8")
    return tmp_path / "texts"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_folder_becomes_one_file_in_the_order_of_its_paths(folder: Path, tmp_path: Path, dtype: str) -> None:
    out, top = tmp_path / "tokens.npy", np.iinfo(dtype).max
    count = tokenize_folder(folder, lambda text: [int(top), *text.encode()], out, end=7, dtype=dtype)
    wanted = [x for name in ("a.txt", "b.txt", "deep/c.txt") for x in (int(top), *TEXTS[name].encode(), 7)]
    found = np.load(out)
    assert found.dtype == np.dtype(dtype) and found.tolist() == wanted and count == len(wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tokens.npy"]


def test_tokenizers_of_the_real_package(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["?"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    tokenize_folder(folder, tokenizer.encode, tmp_path / "tokens.npy", pattern="*.txt")
    assert tokenizer.decode(np.load(tmp_path / "tokens.npy").tolist()) == TEXTS["a.txt"] + TEXTS["b.txt"]


def test_blocks_lie_in_one_file_each(tmp_path: Path) -> None:
    lengths = {"a.npy": 23, "b.npy": 4, "c.bin": 11, "d.npy": 12}  # b is too short for a block
    tokens, first = {}, 0
    for name, length in lengths.items():
        tokens[name] = np.arange(first, first + length, dtype=np.uint16)
        if name.endswith(".npy"):
            np.save(tmp_path / name, tokens[name])
        else:
            tokens[name].tofile(tmp_path / name)
        first += 100
    for block, stride in ((4, None), (4, 1), (5, 3), (10, None)):
        whole = [TokenWindows(x.astype(np.int64), block, stride) for x in tokens.values() if len(x) > block]
        wanted = [(x.tolist(), y.tolist()) for part in whole for x, y in part]
        found = TokenFiles(tmp_path, block, stride)
        assert [(x.tolist(), y.tolist()) for x, y in (found[i] for i in range(len(found)))] == wanted
        again = pickle.loads(pickle.dumps(found))
        x, y = again.take(torch.tensor([len(wanted) - 1, 0]))
        assert x.dtype == y.dtype == torch.int64 and (x[1].tolist(), y[0].tolist()) == (wanted[0][0], wanted[-1][1])
    assert found.num_tokens == 50 and bulk_take(Subset(found, [0])) is not None
    assert all(isinstance(part, np.memmap) for part in TokenFiles(tmp_path, 4)._maps)  # not read into memory
    (tmp_path / "empty.bin").touch()
    assert len(TokenFiles([tmp_path / "empty.bin", tmp_path / "a.npy"], 22)) == 1


def test_bits_of_the_same_tokens_in_memory(tmp_path: Path) -> None:
    tokens = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "tokens.npy", tokens.numpy().astype(np.uint16))

    def trained(data: object, **options: object) -> str:
        torch.manual_seed(1)
        model = CharGPT(60, block_size=8, n_layer=1, n_head=1, n_embd=8)
        trainer = LocalTrainer(model, data)
        return fingerprint(trainer.fit(DiLoCoStrategy(H=2), num_nodes=3, max_steps=6, batch_size=2, **options))

    files = TokenFiles(tmp_path / "tokens.npy", 8)
    assert trained(files) == trained(TokenWindows(tokens, 8)) == trained(files, processes=2)
    assert trained(files) != trained(TokenWindows(tokens.flip(0), 8))


def test_two_processes_may_write_the_same_file(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokens.npy"

    def encode(text: str) -> bytes:
        if not out.exists():
            everywhere(1, lambda rank: tokenize_folder(folder, str.encode, out))
        return text.encode()

    count = tokenize_folder(folder, encode, out)
    assert len(np.load(out)) == count and sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tokens.npy"]


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x93NUMPY", header("{{{{'de"), header("[" * 9999), header("{'descr': 3}"),
        header("{'descr': '<u2', 'fortran_order': False, 'shape': (-1,)}"),
        header("{'descr': '<u2', 'fortran_order': False, 'shape': (10**9,)}"),
        header("{'descr': '<V2', 'fortran_order': False, 'shape': (1,)}") + b"12", pickle.dumps([1, 2]),
    ],
)  # fmt: skip
def test_damaged_files_of_tokens_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npy (is not a readable file of tokens|contains \|V2)"):
        TokenFiles(tmp_path / "a.npy", 1)


def test_several_arrays_in_one_file_and_objects_are_refused(tmp_path: Path) -> None:
    with open(tmp_path / "z.npy", "wb") as file:
        np.savez(file, a=np.arange(10))
    np.save(tmp_path / "o.npy", np.array([1, "a"], dtype=object))
    for name in "zo":
        with pytest.raises(DataError, match="is not a readable file of tokens"):
            TokenFiles(tmp_path / f"{name}.npy", 4)


def test_negative_tokens_are_refused_when_they_are_read(tmp_path: Path) -> None:
    for dtype, wrong in ((np.int16, -5), (np.uint64, 2**64 - 1)):
        np.save(tmp_path / "a.npy", np.arange(20))
        np.save(tmp_path / "b.npy", np.array([*range(12), wrong], dtype=dtype))
        files = TokenFiles(tmp_path, 4)
        assert files.take(torch.arange(6))[0].max() == 15
        with pytest.raises(DataError, match=r"b\.npy has a token that is negative or above 2\^63"):
            files.take(torch.tensor([0, 6, 1]))


def test_what_cannot_be_read_or_written(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "real.npy", np.zeros(9))
    np.save(tmp_path / "short.npy", np.zeros(4, dtype=np.uint16))
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "wrong.npy").write_bytes(b"123")
    for files, message in (
        (tmp_path / "none.npy", "none.npy is not a readable file of tokens"),
        (tmp_path / "real.npy", r"contains float64 \(9,\)"),
        (tmp_path / "odd.bin", "3 bytes are not a multiple of uint16"),
        (tmp_path / "wrong.npy", "not a readable file"),
        (tmp_path / "short.npy", "have no block of block_size=4"),
        (folder, "has no .npy or .bin file"),
        (folder / "a.txt", "neither a .npy nor a .bin file"),
        ([], "pass at least one"),
    ):
        with pytest.raises(DataError, match=message):
            TokenFiles(files, 4)
    with pytest.raises(ArgumentError, match="dtype"):
        TokenFiles(tmp_path / "short.npy", 4, dtype="int64")

    def written(encode: object, out: str = "x.npy", **options: object) -> None:
        tokenize_folder(folder, encode, tmp_path / out, **options)  # type: ignore[arg-type]

    for encode, options, message in (
        (str.split, {}, "expected a list of token ids"),
        (lambda text: [1 << 16], {}, "do not fit uint16: give dtype='uint32'"),
        (lambda text: [-1], {}, "do not fit uint16$"),
        (lambda text: [2**70], {}, "expected a list of token ids"),
        (lambda text: 5, {}, r"encode returned 5 for .*a\.txt: expected a list of token ids"),
        (lambda text: None, {}, "encode returned None for"),
        (lambda text: [[1], [1, 2]], {}, r"encode returned \[\[1\], \[1, 2\]\] for"),
        (lambda text: 1 // 0, {}, r"encode failed for .*a\.txt: ZeroDivisionError"),
        (str.encode, {"out": "nowhere/x.npy"}, "nowhere/x.npy cannot be written .*: name a file in an existing folder"),
        (str.encode, {"pattern": "*.csv"}, r"has no file '\*.csv'"),
        (str.encode, {"out": "x.txt"}, "must end in .npy"),
        (str.encode, {"out": "real.npy"}, "exists"),
    ):
        with pytest.raises(DataError, match=message):
            written(encode, **options)
    (folder / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8"):
        written(str.encode)
    with pytest.raises(ArgumentError, match="is not callable"):
        written("gpt2")
    assert not list(tmp_path.glob("x*"))  # no half file stays


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_a_pipe_in_a_folder_of_tokens_is_refused(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(9, dtype=np.uint16))
    assert len(TokenFiles(tmp_path, 4)) == 2
    os.mkfifo(tmp_path / name)
    with impatient(), pytest.raises(DataError, match="is a folder, a pipe or a device, but must be a regular file"):
        TokenFiles(tmp_path, 4)
