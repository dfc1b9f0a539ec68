"""Examples in tar files: read in order, and from any place."""

import io
import os
import random
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from corrupted import FEW, MANY, impatient, mutated, read_or_refused

from exogym.data import Stream, TarShards
from exogym.errors import ArgumentError, DataError

EXAMPLES = 5


def write(path: Path, first: int, count: int = EXAMPLES) -> None:
    with tarfile.open(path, "w") as tar:
        folder = tarfile.TarInfo("deep")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for k in range(first, first + count):
            for suffix, text in (("cls", str(k)), ("note.txt", "x" * 700 * (k % 3))):
                info = tarfile.TarInfo(f"deep/{k:03d}.{suffix}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))


def number(example: dict[str, Any]) -> int:
    assert example.keys() == {"__key__", "cls", "note.txt"}
    k = int(example["cls"])
    assert example["__key__"] == f"deep/{k:03d}" and len(example["note.txt"]) == 700 * (k % 3)
    return k


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in range(4):
        write(tmp_path / f"part-{part}.tar", EXAMPLES * part)
    return tmp_path


def test_every_example_from_every_place(folder: Path) -> None:
    shards = TarShards(folder, number)
    assert list(shards) == list(shards) == list(range(20))
    for first in range(20):
        walk: Any = iter(shards)
        for _ in range(first):
            next(walk)
        again: Any = iter(shards)
        again.load_state_dict(walk.state_dict())
        assert list(again) == list(range(first, 20))
        walk.close()
    parts = [list(shards.shard(3, index)) for index in range(3)]
    assert parts == [[*range(5), *range(15, 20)], list(range(5, 10)), list(range(10, 15))]


def test_dealt_and_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exogym.data.reading.AHEAD", 3)

    def stream() -> tuple[Stream, Any]:
        made = Stream(TarShards(folder, number), 2, batch_size=1, shuffle=False)
        return made, made.iterated.begin(type("Fleet", (), {"ranks": [0, 1]}))  # type: ignore

    for stop in range(1, 25):
        before, place = stream()
        seen = [int(x) for node in (0, 1) for x in before.batches(node, 0, stop)]
        after, other = stream()
        other.load_shared(place.shared())
        seen += [int(x) for node in (0, 1) for x in after.batches(node, stop, 30 - stop)]
        assert sorted(seen) == sorted([*range(20)] * 3)
        before.close()
        after.close()
    assert "state" in place.shared() or place.shared() == {}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_a_damaged_file_never_ends_in_silence(tmp_path: Path, form: int) -> None:
    """Cut at every block, and with one byte changed in every header: all examples, or an error. Names may be long."""
    file = tmp_path / "a.tar"
    with tarfile.open(file, "w", format=form) as tar:
        for k in range(4):
            info = tarfile.TarInfo(f"{'deep/' * 30 * (k % 2)}{k}.txt")
            info.size = 600
            tar.addfile(info, io.BytesIO(b"x" * 600))
    with tarfile.open(file) as tar:
        names = [member.name.removesuffix(".txt") for member in tar]
        end, headers = tar.offset, {at for m in tar for at in (m.offset, m.offset_data - 512)}  # type: ignore[attr-defined]
    whole, outcomes = file.read_bytes(), []
    damages = [whole[:cut] for cut in range(0, len(whole), 512)] + [whole[: cut + 100] for cut in range(0, end, 512)]
    headers |= {*range(end, len(whole), 512)}  # file names in blocks of their own have no sum: nobody can check those
    damages += [whole[: at + byte] + bytes([whole[at + byte] ^ 255]) + whole[at + byte + 1 :]
                for at in headers for byte in (10, 130, 156)]  # fmt: skip
    damages += [whole + whole, b"<html>not found</html>" * 99]
    for damaged in damages:
        file.write_bytes(damaged)
        try:
            assert [example["__key__"] for example in TarShards([file])] == names
            outcomes.append("whole")
        except DataError as error:
            assert "is not a readable tar file" in str(error)
            outcomes.append("refused")
    assert outcomes.count("whole") == (len(whole) - end) // 512 - 1  # only cuts behind the first block of zeros
    file.write_bytes(whole[: end + 512])
    walk: Any = iter(TarShards([file]))
    places = [walk.state_dict() for _ in walk]
    file.write_bytes(whole[:end])
    for place in [{"file": 0, "offset": 0}, *places[:-1]]:  # also from every place inside
        walk.load_state_dict(place)
        with pytest.raises(DataError, match="neither a file nor the tar file's end"):
            list(walk)


def members(file: Path, *names: str) -> list[dict[str, Any]]:
    with tarfile.open(file, "w") as tar:
        for k, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(str(k).encode()))
    return list(TarShards([file]))


def test_names_that_make_no_example(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    assert members(file, "README", "./._8.txt", "./8.txt", ".DS_Store", "./8.cls", "a.b/9", "a.b/9.", "end") == [
        {"__key__": "./8", "txt": b"2", "cls": b"4"}
    ]
    for names in (("7.txt", "7.txt"), ("7.txt", "7.cls", "7.txt"), ("7.__key__",)):
        with pytest.raises(DataError, match=r"a\.tar has two files '7\..*' in a row: give each file its own name"):
            members(file, *names)


def header(form: int, change: dict[int, bytes]) -> bytes:
    """Return the header of an empty file 0.txt, with other bytes at some places, and its sum."""
    found = bytearray(tarfile.TarInfo("0.txt").tobuf(form))
    for at, new in (change | {148: b" " * 8}).items():
        found[at : at + len(new)] = new
    found[148:156] = b"%06o\0 " % sum(found)
    return bytes(found)


def test_a_small_file_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    file, size = tmp_path / "a.tar", b"%011o\0" % 600_000_000
    holes = {156: b"S", 386: b"%011o\0%011o\0" % (0, 0), 483: size}
    long, negative = b"\x80" + (10**18).to_bytes(11, "big"), b"\xff" * 12
    tracemalloc.start()
    try:
        for change, message in (
            (holes, r"a\.tar: '0\.txt' is a sparse file, with holes"),
            ({124: size}, "is not a readable tar file: ReadError: "),
            ({124: long}, "is not a readable tar file: ReadError: "),
            ({124: negative}, "is not a readable tar file"),
            ({156: b"x", 124: long}, "is not a readable tar file"),  # extended headers, and a long name
            ({156: b"L", 124: long}, "is not a readable tar file"),
        ):
            file.write_bytes(header(tarfile.GNU_FORMAT, change) + bytes(1024))
            with pytest.raises(DataError, match=message):
                list(TarShards([file]))
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def signed(block: bytes) -> bytes:
    return block[:148] + b"%06o\0 " % sum(block[:148] + b" " * 8 + block[156:512]) + block[156:]


def pax(**fields: str) -> bytes:
    """Return an extended header, and the header of a file README of 512 bytes."""
    info = tarfile.TarInfo("README")
    info.size, info.pax_headers = 512, fields
    return info.tobuf(tarfile.PAX_FORMAT)


LONG = header(tarfile.GNU_FORMAT, {156: b"L", 124: b"%011o\0" % 512}) + b"deep/0.txt".ljust(512, b"\0")
FILE = header(tarfile.GNU_FORMAT, {124: b"%011o\0" % 512})
HOSTILE = {
    "a size of -512": FILE + bytes(512) + header(tarfile.GNU_FORMAT, {0: b"README", 124: b"\xff" * 10 + b"\xfe\0"}),
    "an extended size of -512": FILE + bytes(512) + pax(size="-512"),
    "an extended size of -1536": FILE + bytes(512) + pax(size="-1536"),
    "5,000 long names of one file": LONG * 5000 + FILE + bytes(512),
    "5,000 extended headers of one file": pax(comment="x")[:1024] * 5000 + FILE + bytes(512),
    "a long extended header": pax(comment="x" * 300_000) + bytes(512),
    "global headers that each file copies": b"".join(
        tarfile.TarInfo.create_pax_global_header({f"k{i}-{k}": "x" for k in range(3000)}) for i in range(9)
    ) + FILE + bytes(512),
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_headers_that_lead_round_in_circles_or_nest_are_refused(data: bytes, tmp_path: Path) -> None:
    """tarfile takes the first of them for ever, ends the others in a RecursionError, or in a time that grows faster."""
    file = tmp_path / "a.tar"
    file.write_bytes(data + bytes(1024))
    with impatient(), pytest.raises(DataError, match=r"a\.tar is not a readable tar file: ReadError: ") as caught:
        list(TarShards([file]))
    assert "\n" not in str(caught.value)
    file.write_bytes(LONG * 3 + FILE + bytes(512) + pax(comment="x" * 9000) + bytes(512 + 1024))
    assert list(TarShards([file])) == [{"__key__": "deep/0", "txt": bytes(512)}]  # the control


def test_a_pipe_is_no_tar_file(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", 0)
    (tmp_path / "c.tar").symlink_to("a.tar")
    assert len(list(TarShards(tmp_path))) == 2 * EXAMPLES  # a link to a file is read
    os.mkfifo(tmp_path / "b.tar")
    with (
        impatient(),
        pytest.raises(DataError, match=r"b\.tar is a folder, a pipe or a device, but must be a regular file"),
    ):
        list(TarShards(tmp_path))


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_tar_files_are_refused_or_read(count: int, tmp_path: Path) -> None:
    """Half of the changed headers get their right sum again, so that tarfile believes the rest of them."""
    file, wholes = tmp_path / "a.tar", []
    for form in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(file, "w", format=form) as tar:
            for k in range(4):
                info = tarfile.TarInfo(f"{'deep/' * (20 if form == tarfile.USTAR_FORMAT else 40) * (k % 2)}{k}.txt")
                info.size = 600
                tar.addfile(info, io.BytesIO(b"x" * 600))
        wholes.append(file.read_bytes()[:10240])
    outcomes = []
    for seed in range(count):
        draw = random.Random(seed)
        whole = draw.choice(wholes)
        headers = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
        damaged = mutated(draw, whole, [range(at, at + 512) for at in headers])
        if draw.random() < 0.5:
            for at in headers:
                damaged = damaged[:at] + signed(damaged[at : at + 512]) + damaged[at + 512 :]
        file.write_bytes(damaged)
        outcomes.append(read_or_refused(lambda: list(TarShards([file])), tmp_path)[0])
    assert min(map(outcomes.count, ("read", "refused"))) > count // 10


def test_what_cannot_be_read(folder: Path) -> None:
    damaged = folder / "z-damaged.tar"
    damaged.write_bytes((folder / "part-1.tar").read_bytes()[:3000])
    for made, message in (
        (lambda: TarShards(folder / "none"), r"none is not a readable tar file: FileNotFoundError"),
        (lambda: TarShards([damaged], number), r"z-damaged\.tar is not a readable tar file: ReadError"),
        (
            lambda: TarShards(folder, lambda example: example["jpg"]),
            r"decode failed for 'deep/000' in .*KeyError: 'jpg'",
        ),
        (lambda: TarShards([]), "no tar file"),
        (lambda: TarShards(folder).shard(6, 0), "of 5 tar files: expected an index from 0 to 5, and at least one file"),
    ):
        with pytest.raises(DataError, match=message):
            list(made())
    with pytest.raises(ArgumentError, match="decode='jpg' is not callable"):
        TarShards(folder, "jpg")  # type: ignore[arg-type]
