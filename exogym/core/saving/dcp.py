"""Take a run's nodes to a trainer that reads torch.distributed.checkpoint (DCP), such as FSDP2, and back.

`export_dcp` writes a node of a checkpoint in the layout of torch's `get_state_dict`. `import_dcp` reads folders that
the other trainer saved, and writes a checkpoint of later steps, from which the run resumes.

DCP stores its index as a pickle. This module unpickles only the few classes of an index, reads tensors with torch's
`weights_only`, and opens only plain files of the folder. So reading a stranger's folder runs no code. torch saves each
piece of a tensor as a zip file with checksums, but ignores these checksums when it reads. This module checks them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import os
import pickle
import pickletools
import warnings
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym.core.base.files import beside, is_plain, missing_folders, opened_plain, remove_folders
from exogym.core.communicator import Wire
from exogym.core.fleet.layout import hidden_matrices, layouts_of
from exogym.core.saving.checkpoint import differences, load_newest, save
from exogym.core.saving.checkpoint_files import WRONG, Snapshot, list_checkpoints
from exogym.core.saving.keepers import holding, one_keeper
from exogym.core.saving.snapshots import MARK, mark_of
from exogym.errors import ArgumentError, CheckpointError, ExoGymError, ModelError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    from exogym.strategy.strategy import Strategy

MODEL, STATE, GROUPS = "model.", "optim.state.", "optim.param_groups"
INDEX = ".metadata"
INDEX_BYTES = 1 << 30  # largest index
# The only classes that an index may hold, beside torch's dtypes.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}
CHANGED = ("faults", "balance", "local_steps", "local_epochs")  # options that change which local steps a node takes


def export_dcp(
    save_dir: str | Path, folder: str | Path, model: nn.Module, strategy: Strategy, node: int | None = None
) -> list[Path]:
    """Write nodes of the newest checkpoint in `save_dir` as DCP checkpoints, which FSDP2 loads. Return their folders.

    A folder holds, for P parameters, about 3 P numbers with AdamW: `model.NAME` for the model's state dict,
    `optim.state.NAME.exp_avg` and so on for the inner optimizer, and `optim.param_groups` with its options. Not in the
    folder, because a plain trainer has no place for it: outer parameters and momentum, residuals of compression, the
    data order, random states, the learning rate's schedule, the history. `save_dir` keeps all these for the return.

    Args:
        save_dir: the run's checkpoint folder.
        folder: a new folder. It gets a DCP checkpoint `node_<i>` for each node i.
        model: the run's model, for names and frozen parameters. It does not change.
        strategy: the run's strategy, whose `inner_optim` names the optimizer.
        node: write only this node, into `folder` itself.

    Raises:
        ArgumentError: the folder exists or cannot be written, or a node or the strategy does not fit.
        CheckpointError: `save_dir` has no readable checkpoint, or the optimizer holds other state than tensors.
        ModelError: the checkpoint is of another model.

    Example:
        export_dcp("runs/first", "away", model, DiLoCoStrategy(H=10, lr=3e-3))
    """
    snapshot, subject = _newest(save_dir), _Subject(model, strategy)
    subject.check(snapshot)
    folder = Path(folder)
    if node is not None and node not in snapshot.rows:
        raise ArgumentError(f"node={node!r} has no row in {snapshot.path}: pass one of {sorted(snapshot.rows)}")
    if folder.exists() or folder.is_symlink():
        raise ArgumentError(f"folder={str(folder)!r} exists: pass a new folder")
    wanted = {i: folder / f"node_{i}" for i in sorted(snapshot.rows)} if node is None else {node: folder}
    made = missing_folders(folder.parent)
    try:
        with beside(folder) as temporary:
            for i, target in wanted.items():
                _write(subject.state(snapshot.rows[i]), temporary / target.relative_to(folder))
    except OSError as error:
        remove_folders(made)
        raise ArgumentError(f"folder={str(folder)!r} cannot be written ({error}): pass another folder") from error
    return list(wanted.values())


def import_dcp(save_dir: str | Path, folder: str | Path, model: nn.Module, strategy: Strategy, steps: int) -> Path:
    """Take nodes back into their run: write a checkpoint `steps` after the newest one in `save_dir`. Return its folder.

    Each node gets its parameters, buffers and inner optimizer state from `folder`. All else comes from the newest
    checkpoint, which must be the exported one. `fit(..., save_dir=save_dir, resume=True)` with the run's own options
    goes on after the steps taken elsewhere. The history has no records of these steps, and a virtual clock does not
    count them. A node's next batch is the batch after `steps` batches.

    The steps must be local steps: no synchronization may be due in them. With `SimpleReduceStrategy` (DDP), `folder` is
    one DCP checkpoint of the one model that all nodes share.

    Args:
        folder: a folder with a DCP checkpoint `node_<i>` for each node, in `export_dcp`'s layout, or one DCP checkpoint
            that every node takes. ExoGym unpickles nothing but DCP's index, and of this index only known classes.
        steps: the optimizer steps taken elsewhere.

    Raises:
        ArgumentError: the folder is missing, or `steps` or the strategy does not fit.
        CheckpointError: a file is damaged, holds other tensors, or its optimizer took another number of steps.

    Example:
        import_dcp("runs/first", "back", model, DiLoCoStrategy(H=10, lr=3e-3), steps=3)
    """
    if type(steps) is not int or steps < 1:
        raise ArgumentError(f"steps={steps!r} must be a whole number of at least 1")
    subject, save_dir = _Subject(model, strategy), Path(save_dir)
    _newest(save_dir)  # before the lock, which would make the folder
    keepers = holding(save_dir, Wire([]), one_keeper(save_dir, Wire([])))
    try:
        found = _moved_on(_newest(save_dir), subject, Path(folder), steps)
        return save(save_dir, found, len(list_checkpoints(save_dir)) + 1, Wire(sorted(found.rows)), keepers)
    finally:
        keepers.release()


def _moved_on(snapshot: Snapshot, subject: _Subject, folder: Path, steps: int) -> Snapshot:
    """Return `snapshot` after `steps` steps, with the nodes' values from `folder`."""
    subject.check(snapshot)
    shares = (folder / INDEX).exists()
    _check_local(snapshot, subject.strategy, steps, shares)
    sources = {i: folder if shares else folder / f"node_{i}" for i in snapshot.rows}
    if missing := [str(path) for path in sources.values() if not (path / INDEX).exists()]:
        raise ArgumentError(
            f"folder={str(folder)!r} lacks {missing[0]}/{INDEX}: pass the folder that DCP saved for each node"
        )
    step = snapshot.meta["step"] + steps
    meta = snapshot.meta | {"step": step, "logged": step, "apart": None}
    meta["history"] = snapshot.meta["history"] | {"last_step": step}
    for name in ("format", "sha256"):
        del meta[name]
    rows = {i: subject.row(snapshot.rows[i], path, steps) for i, path in sources.items()}
    found = Snapshot(rows, dict(snapshot.shared), meta)
    for tensors in (*found.rows.values(), found.shared):
        tensors[MARK] = mark_of(tensors, meta)
    return found


def _newest(save_dir: str | Path) -> Snapshot:
    found, complaints = load_newest(save_dir)
    if found is None:
        raise CheckpointError(f"{save_dir} has no checkpoint: pass save_dir and checkpoint_interval to fit")
    if complaints:
        raise CheckpointError(f"{complaints[0]}; remove the damaged checkpoint, or restore its files")
    if found.meta.get("begun_end") is not None:
        raise CheckpointError(
            f"{found.path} was written between synchronizations, when nodes may have taken different steps: "
            "resume the run to its next checkpoint"
        )
    return found


def _check_local(snapshot: Snapshot, strategy: Any, steps: int, shares: bool) -> None:
    """Raise ArgumentError unless the `steps` steps after the checkpoint are local steps of a node."""
    name, first = type(strategy).__name__, snapshot.meta["step"]
    description = snapshot.meta["description"]
    if (taken := {int(row["steps.taken"]) for row in snapshot.rows.values()}) != {first}:
        raise ArgumentError(
            f"nodes have taken {sorted(taken)} steps: only a run whose nodes take every step can be imported again"
        )
    if len(snapshot.rows) != description["num_nodes"] or description["strategy"].get("client_fraction", 1) != 1:
        raise ArgumentError("only some clients train in a round (client_fraction): such a run cannot come back")
    options = description["strategy"] | description
    if given := [option for option in CHANGED if options.get(option) is not None]:
        raise ArgumentError(
            f"the run has {given[0]}=, which changes the local steps: such a run cannot be imported again"
        )
    is_plain_ddp = (
        strategy.bucket_bytes is not None
        and len(strategy.gradient_modules) == 1
        and not strategy.communication_modules
        and not strategy.averaging.features()
    )
    if is_plain_ddp:
        if not shares:
            raise ArgumentError(f"under {name} all nodes have one model: pass the folder of one DCP checkpoint")
        return
    end = next_synchronization(strategy, first)
    if end is None:
        raise ArgumentError(f"{name} does not take plain local steps, so no other trainer can take its steps")
    if first + steps >= end:
        most = end - first - 1
        raise ArgumentError(
            f"{name} synchronizes after step {end}, so after step {first} another trainer can take at most {most} "
            f"steps, but steps={steps}: let the run save at another step{', or take fewer steps' if most else ''}"
        )


def next_synchronization(strategy: Any, step: int) -> int | None:
    """Return the first step after `step` after which `strategy` acts; None if its local steps are not plain ones."""
    from exogym.strategy.capabilities import Corrects

    if strategy.driven_by != "rounds" or strategy.gradient_modules or strategy.tuning:
        return None
    modules = strategy.communication_modules
    if any(isinstance(module, Corrects) for module in modules):
        return None
    return min((module.next_event(step) for module in modules), default=None)


class _Subject:
    """The run's model and inner optimizer, with names for a row's tensors."""

    def __init__(self, model: nn.Module, strategy: Strategy):
        if getattr(strategy, "driven_by", None) != "rounds":
            raise ArgumentError(
                f"strategy={strategy!r} is not made of modules, so a node is more than a model and an inner optimizer: "
                "save the model alone, with save_model"
            )
        inner = strategy.inner
        self.model, self.strategy, self.layouts = model, strategy, layouts_of(model)
        parameters = dict(model.named_parameters())
        self.named = {slot.name: parameters[slot.name] for layout in self.layouts for slot in layout}
        optimizer = inner.spec.build(self.named, may_fuse=False, hidden=hidden_matrices(model))
        names = {id(p): name for name, p in self.named.items()}
        self.groups: list[dict[str, Any]] = [
            {key: x for key, x in group.items() if key not in ("params", "param_names")}
            | {"params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        self.names = [name for group in self.groups for name in group["params"]]

    def check(self, snapshot: Snapshot) -> None:
        """Raise ModelError or ArgumentError if the checkpoint is of another model or strategy."""
        from exogym.core.training.options import describe
        from exogym.core.training.resuming import sum_of_shared

        saved = snapshot.meta["description"]
        model = [[slot.name, list(slot.shape), str(layout.dtype)] for layout in self.layouts for slot in layout]
        if saved["model"] != model:
            unlike = next((a or b for a, b in itertools.zip_longest(saved["model"], model) if a != b), None)
            raise ModelError(f"{snapshot.path} is of another model than this {type(self.model).__name__}: see {unlike}")
        if unlike := differences(saved["strategy"], describe(self.strategy), "strategy."):
            raise ArgumentError(f"{snapshot.path} is of another run:\n  " + "\n  ".join(unlike))
        row = next(iter(snapshot.rows.values()))
        changed = [name.removeprefix("fleet.buffer.") for name in row if name.startswith("fleet.buffer.")]
        if saved.get("shared") != sum_of_shared(self.model, changed):
            raise ModelError(
                f"{snapshot.path} belongs to a model with other frozen parameters or constant buffers, which "
                "checkpoints do not contain: pass the run's model"
            )

    def state(self, row: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return a node's flat state dict for DCP: parameters, buffers, and the inner optimizer's state and options."""
        slots = [(b, slot) for b, layout in enumerate(self.layouts) for slot in layout]
        values = {slot.name: slot.of(row[f"fleet.params.{b}"]) for b, slot in slots}
        known = {id(p): values[name] for name, p in self.named.items()}
        whole = self.model.state_dict(keep_vars=True)
        buffers = {name: row.get(f"fleet.buffer.{name}", x.detach()) for name, x in whole.items()}
        found: dict[str, Any] = {MODEL + name: known.get(id(x), buffers[name]) for name, x in whole.items()}
        for key, value in row.items():
            if key.startswith("optimizer."):
                number, _, entry = key.removeprefix("optimizer.").partition(".")
                if not number.isdigit():
                    raise CheckpointError(
                        f"the inner optimizer of {type(self.strategy).__name__} contains more than tensors ({key}), so "
                        "no other trainer can load its state: save the model alone, with save_model"
                    )
                found[f"{STATE}{self.names[int(number)]}.{entry}"] = value
        for k, group in enumerate(self.groups):
            for key, value in group.items():
                found[f"{GROUPS}.{k}.{key}"] = value  # torch's get_optimizer_state_dict
                if key != "params":  # the same with flatten_optimizer_state_dict=True
                    found |= {f"{GROUPS}.{name}.{key}": value for name in group["params"]}
        return found

    def row(self, before: Mapping[str, Tensor], folder: Path, steps: int) -> dict[str, Tensor]:
        """Return a node's row after `steps` steps elsewhere: `before`, with the values of the DCP checkpoint."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        wanted = {MODEL + slot.name: (tuple(slot.shape), layout.dtype) for layout in self.layouts for slot in layout}
        buffers = {key: x for key, x in before.items() if key.startswith("fleet.buffer.")}
        names = {key: MODEL + key.removeprefix("fleet.buffer.") for key in buffers}
        wanted |= {names[key]: (tuple(x.shape), x.dtype) for key, x in buffers.items()}
        with _guarded(folder):
            reader = _reader(folder)
            index = reader.read_metadata()
            tensors = {n: x for n, x in index.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
            sizes = {name: (tuple(x.size), x.properties.dtype) for name, x in tensors.items()}
            state = self._state_names(sizes)
            wanted |= self._state_wanted(before, state, folder)
            for name, (shape, dtype) in wanted.items():
                if sizes.get(name) != (shape, dtype):
                    given = "nothing" if name not in sizes else f"{sizes[name][1]} {sizes[name][0]}"
                    raise CheckpointError(f"{folder}: {name!r} is {given}, expected {dtype} {shape}")
            _check_pieces(index, folder, {*wanted, *state})
            values = _read(reader, {name: sizes[name] for name in (*wanted, *state)})
        result = {key: x for key, x in before.items() if not key.startswith("optimizer.")}
        for b, layout in enumerate(self.layouts):
            result[f"fleet.params.{b}"] = torch.cat([values[MODEL + slot.name].reshape(-1) for slot in layout])
        result |= {key: values[name] for key, name in names.items()}
        result |= {f"optimizer.{key}": values[name] for name, key in state.items()}
        self._check_steps(before, result, folder, steps)
        result["steps.taken"] = before["steps.taken"] + steps
        return result

    def _state_wanted(self, before: Mapping[str, Tensor], found: Collection[str], folder: Path) -> dict[str, Any]:
        """Return the names in DCP, shapes and dtypes of the optimizer's tensors that a node has had before."""
        had = {key.removeprefix("optimizer."): x for key, x in before.items() if key.startswith("optimizer.")}
        if had and not found:
            raise CheckpointError(f"{folder} has no {STATE}NAME: save the optimizer's state dict as 'optim' as well")
        wanted = {}
        for key, x in had.items():
            number, _, entry = key.partition(".")
            wanted[f"{STATE}{self.names[int(number)]}.{entry}"] = tuple(x.shape), x.dtype
        return wanted

    def _state_names(self, sizes: Mapping[str, Any]) -> dict[str, str]:
        """Return the names of the optimizer's tensors in a DCP checkpoint, with their names in a row."""
        found = {}
        for number, name in enumerate(self.names):
            prefix, largest = f"{STATE}{name}.", self.named[name].numel()
            for key, (shape, _) in sizes.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :] and math.prod(shape) <= largest:
                    found[key] = f"{number}.{key[len(prefix) :]}"
        return found

    def _check_steps(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], folder: Path, steps: int) -> None:
        for key in after:
            if key.startswith("optimizer.") and key.endswith(".step"):
                done = float(after[key]) - float(before.get(key, torch.zeros(())))
                if done != steps:
                    raise CheckpointError(
                        f"{folder}: the optimizer took {done:g} steps since the newest checkpoint, but steps={steps}: "
                        "pass the number of steps taken elsewhere"
                    )


# DCP's files


def _write(state: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    folder.mkdir(parents=True)
    held = {name: x.detach().cpu().contiguous().clone() if isinstance(x, Tensor) else x for name, x in state.items()}
    with _in_one_process():
        dcp.save(held, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """Silence torch's warning that it saves or loads in one process, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class _Index(pickle.Unpickler):
    """Reads DCP's index, and refuses every class and function that an index does not need.

    A pickle can also set attributes of the objects that it names. So it gets copies of classes and functions.
    """

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of DCP needs")
        found: Any = super().find_class(module, name)
        if is_dtype or found in (torch.Size, OrderedDict):  # these have no attributes to set
            return found
        if dataclasses.is_dataclass(found):
            parents: tuple[Any, ...] = (found,)
            return type(name, parents, {})
        return lambda *given: found(*given)


def _check_memory(data: bytes) -> None:
    """Raise UnpicklingError if a short pickle asks for much memory, before Python makes room for it."""
    for code, number, place in pickletools.genops(data):
        if code.name == "BYTEARRAY8" or (code.name.endswith("PUT") and int(number or 0) > (place or 0)):
            raise pickle.UnpicklingError(f"it has the instruction {code.name} at byte {place}")


def _reader(folder: Path) -> FileSystemReader:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

    file = folder / INDEX
    with _guarded(file):
        if not is_plain(file) or file.stat().st_size > INDEX_BYTES:
            raise CheckpointError(f"{file} must be a regular file of at most {INDEX_BYTES} bytes")
        with opened_plain(file) as opened:
            data = opened.read()
        _check_memory(data)
        found = _Index(io.BytesIO(data)).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{file} must contain DCP's Metadata, not {type(found).__name__}")
        found.storage_meta = StorageMeta()
        every = found.storage_data.items()
        found.storage_data = {MetadataIndex(key.fqn, key.offset, key.index): info for key, info in every}
        for info in found.storage_data.values():
            path = folder / info.relative_path
            if Path(info.relative_path).name != info.relative_path or not (path.exists() and is_plain(path)):
                raise CheckpointError(f"{file} names {info.relative_path!r}, which is no plain file in {folder}")
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{path} is compressed: save without extensions")

    class Reader(FileSystemReader):
        """A reader that uses the checked index."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return found

    return Reader(folder)


def _is_covered(size: tuple[int, ...], pieces: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether each element of a tensor is in exactly one of its pieces (place of the first element, size)."""
    if any(len(place) != len(size) or len(here) != len(size) for place, here in pieces):
        return False
    if any(not (0 <= a <= a + n <= end) for x in pieces for a, n, end in zip(*x, size, strict=True)):
        return False
    if sum(math.prod(here) for _, here in pieces) != math.prod(size):
        return False
    seen = torch.zeros(size, dtype=torch.bool)
    for piece in pieces:
        seen[tuple(slice(a, a + n) for a, n in zip(*piece, strict=True))] = True
    return bool(seen.all())  # and none twice, because the pieces have as many elements as the tensor


def _check_pieces(index: Metadata, folder: Path, names: Collection[str]) -> None:
    """Raise CheckpointError if the files of `names` are damaged, or if the index gives two pieces the same bytes.

    The pieces of each of these tensors must cover it. The tensors have the sizes of the run's own.
    """
    for name in names:
        x: Any = index.state_dict_metadata[name]
        if not _is_covered(tuple(x.size), [(tuple(c.offsets), tuple(c.sizes)) for c in x.chunks]):
            raise CheckpointError(
                f"{folder / INDEX}: the pieces of {name!r} do not cover its {x.size.numel()} elements once each: "
                "save the nodes again"
            )
    places = defaultdict(list)
    for key, info in index.storage_data.items():
        places[info.relative_path].append((int(info.offset), int(info.length), key.fqn))
    for file, pieces in places.items():
        with opened_plain(folder / file) as opened:
            end = 0
            for offset, length, name in sorted(pieces):
                if offset < end or length < 0:
                    raise CheckpointError(f"{folder / INDEX} assigns to {name!r} bytes of another tensor in {file}")
                end = offset + length
                if name in names:
                    opened.seek(offset)
                    _check_sums(opened.read(min(length, os.fstat(opened.fileno()).st_size)), folder / file, name)


def _check_sums(piece: bytes, file: Path, name: str) -> None:
    """Raise CheckpointError unless the checksums in a piece, a zip file of torch.save, are right."""
    try:
        with zipfile.ZipFile(io.BytesIO(piece)) as entries:
            packed = (x.filename for x in entries.infolist() if x.compress_type != zipfile.ZIP_STORED)
            wrong = next(packed, None) or entries.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise CheckpointError(f"{file} is damaged at {name!r} ({error}): copy the file again") from error
    if wrong is not None:
        raise CheckpointError(
            f"{file} is damaged at {name!r}, where the checksum of {wrong} is wrong: copy the file again, or save it "
            "without torch.serialization.set_crc32_options(False)"
        )


def _read(reader: FileSystemReader, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {name: torch.full(shape, 0, dtype=dtype) for name, (shape, dtype) in wanted.items()}
    with _in_one_process():
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@contextlib.contextmanager
def _guarded(file: Path) -> Iterator[None]:
    """Turn errors from wrong files into a CheckpointError that names the file."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except ExoGymError:
        raise
    except (*WRONG, pickle.UnpicklingError, EOFError, ImportError, AssertionError, CheckpointException) as error:
        raise CheckpointError(f"{file} is not a DCP checkpoint: {error!r}"[:500]) from error
