"""A comparison's folder. If the process is killed, at most the unfinished run is lost.

run.json                   the options, written at the start, and the results, written at the end
diloco-H-20-seed-0/        a run folder (`core.record.run_folder`) for each strategy and seed, with
    history.safetensors    the run's history
    outcome.json           the run's state or error, seconds and description; written last, so it marks a complete run
    checkpoints/           only while the run trains
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from exogym.core.base.locks import LOCK, Lock, acquire
from exogym.core.base.processes import described
from exogym.errors import ArgumentError
from exogym.files import new_folder, write_json
from exogym.logger import check_writable, in_json
from exogym.record import read_file, versions
from exogym.study.compare.comparison import plain_name

RUN, HISTORY = "run.json", "history.safetensors"
OUTCOME, CHECKPOINTS = "outcome.json", "checkpoints"
STATUS = "status.json"  # only in the folder of a single run
ALL_ARGUMENTS = "all_arguments"  # in run.json: each strategy's arguments, also those with default values
OPTION = {"problem": "dataset"}  # arguments with another name on the command line
MOST_ALIKE = 100  # labels whose folders differ only by a number


class Folder:
    """The folder of a comparison with the strategies `labels`. While `lock` is held, no other process writes there."""

    def __init__(self, path: Path, labels: Iterable[str], made: Iterable[Path] = (), lock: Lock | None = None) -> None:
        self.path, self.lock, self._made, self._names = path, lock, list(made), dict[str, str]()
        taken: set[str] = set()
        for label in labels:
            name, alike = plain_name(label), 0
            while name in taken:
                name, alike = f"{name}-2", alike + 1
                if alike > MOST_ALIKE:
                    raise ArgumentError(
                        f"strategies: more than {MOST_ALIKE} texts such as {label[:80]!r} have the same letters, so "
                        "their folders would have the same name: compare fewer of these strategies at once"
                    )
            self._names[label] = name
            taken.add(name)

    @classmethod
    def new(cls, out: str | os.PathLike[str], name: str, labels: Iterable[str]) -> Folder:
        """Make `<out>/<name>-<time>`. Raise ArgumentError if `out` is not writable, or a comparison's own folder."""
        _refuse_single_run(out)
        if (Path(out) / RUN).exists():
            raise ArgumentError(
                f"out={os.fspath(out)!r} has results: resume them with resume=True (--resume), or pass another folder"
            )
        inside = Path(out).expanduser()
        above = [folder for folder in (inside, *inside.parents) if not folder.exists()]
        path = new_folder(out, plain_name(name))
        return cls(path, labels, [path, *above], lock_of(path))

    @classmethod
    def of_asked(cls, out: str | os.PathLike[str], asked: dict[str, Any], labels: Iterable[str]) -> Folder:
        """Open an earlier comparison's folder `out` to resume it with the same options.

        Raise ArgumentError if `out` contains no comparison, is in use, or has other options, which the message lists.
        """
        path = Path(out).expanduser()
        lock = locked(path, lambda: check_same(out, "comparison", saved_in(out), asked))
        return cls(path, labels, lock=lock)

    def beat(self) -> None:
        """Tell other processes that this one still writes into the folder."""
        if self.lock is not None:
            self.lock.beat()

    def release(self) -> None:
        """Release the lock, so that other processes may write into the folder."""
        if self.lock is not None:
            self.lock.release()

    def describe(self, description: dict[str, Any]) -> None:
        """Write the comparison's description into run.json."""
        write_json(self.path / RUN, description)

    def child(self, label: str, seed: int) -> Path:
        return self.path / f"{self._names[label]}-seed-{seed}"

    def drop_if_empty(self) -> bool:
        """Remove a new folder and its new parents, and return True, if it has no result and no checkpoint."""
        results = (f"*/{HISTORY}", f"*/{CHECKPOINTS}/step_*")
        kept = any(next(self.path.glob(pattern), None) for pattern in results)
        if kept or not self._made:
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        for above in self._made[1:]:
            with contextlib.suppress(OSError):
                above.rmdir()
        return True


def _refuse_single_run(out: str | os.PathLike[str]) -> None:
    if (Path(out).expanduser() / STATUS).exists():
        raise ArgumentError(f"out={os.fspath(out)!r} is the folder of a single run: pass another folder")


def check_same(out: str | os.PathLike[str], kind: str, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise ArgumentError, with the differences, unless a comparison's folder was made with the same options."""
    if unlike := unlike_in(saved, asked):
        raise ArgumentError(
            f"out={os.fspath(out)!r} contains a {kind} with other options: resume it with the same options, or pass "
            "another folder. The differences:\n  " + "\n  ".join(unlike)
        )


def unlike_in(saved: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Return a line for each option in `asked` that differs in a saved description."""
    from exogym.core.saving.checkpoint import differences

    asked = _known_to(saved, in_json(asked))  # numbers that JSON lacks, as in `saved`
    before = {key: saved.get(key) for key in (*asked, "options")}  # "options" exists if some are not defaults
    if isinstance(before.get(ALL_ARGUMENTS), dict):
        before[ALL_ARGUMENTS] = _without_retired(saved, asked[ALL_ARGUMENTS])
    return differences(before, asked)


def _without_retired(saved: dict[str, Any], asked: Any) -> dict[str, Any]:
    """Return the saved arguments of strategies without the defaults of arguments that ExoGym no longer has."""
    given = saved.get("strategies")
    found = {}
    for label, arguments in saved[ALL_ARGUMENTS].items():
        now, own = (of.get(label) if isinstance(of, dict) else None for of in (asked, given))
        found[label] = arguments
        if isinstance(arguments, dict) and isinstance(now, dict) and isinstance(own, dict):
            found[label] = {key: value for key, value in arguments.items() if key in now or key in own}
    return found


def _known_to(saved: Any, asked: Any, are_arguments: bool = False) -> Any:
    """Return `asked` without arguments of strategies that ExoGym did not have yet when it wrote `saved`."""
    if not isinstance(saved, dict) or not isinstance(asked, dict):
        return asked
    return {
        key: _known_to(saved.get(key), value, are_arguments or key == ALL_ARGUMENTS)
        for key, value in asked.items()
        if key in saved or not (are_arguments or key == ALL_ARGUMENTS)
    }


def lock_of(path: Path) -> Lock:
    """Lock the folder `path` (the argument `out`). Raise ArgumentError if it is in use or cannot be written."""
    return acquire(path, secrets.token_hex(8), "out")


def locked(path: Path, check: Callable[[], object]) -> Lock:
    """Lock the folder `path` (the argument `out`), whose contents `check` checks and in which no link may lead out."""
    if not (path / LOCK).exists():  # otherwise another process works there or was killed; `lock_of` finds out
        check()
        check_writable(path, "out")
    lock = lock_of(path)
    try:
        check()  # again, because another process may have worked here
        check_plain(path)
    except BaseException:
        lock.release()
        raise
    return lock


def is_empty(path: Path) -> bool:
    """Return whether a folder does not exist, or holds at most a lock."""
    return not path.exists() or (path.is_dir() and all(file.name.startswith(LOCK) for file in path.iterdir()))


def begun() -> dict[str, Any]:
    """Return what tells where and when a comparison or sweep began, as JSON."""
    return {"versions": versions(), "process": described(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def saved_in(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the description in a comparison's folder. Raise ArgumentError for any other folder."""
    path = Path(out).expanduser()
    _refuse_single_run(out)
    if (path / RUN).exists():
        found = read(path / RUN)
        if not isinstance(found.get("strategies"), dict):
            raise ArgumentError(f"out={os.fspath(out)!r} contains no comparison to resume: pass a comparison's folder")
        return found
    inside = sorted(found.parent for found in path.glob(f"*/{RUN}"))
    hint = f"did you mean {str(inside[-1])!r}?" if inside else "pass a comparison's folder"
    raise ArgumentError(f"out={os.fspath(out)!r} contains no comparison to resume: {hint}")


def check_plain(path: Path) -> None:
    """Raise ArgumentError unless all in a folder is plain files or folders: links could lead out, pipes never end."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                check_plain(Path(entry.path))
            elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                raise ArgumentError(f"{entry.path} is a link, a pipe or a device: remove it, or pass another folder")


def named_again(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a comparison that name code or a file outside its folder.

    Anybody may have written the folder, so a resumed comparison takes them from the user instead.

    >>> named_again({"problem": "my_task:make", "data": None, "network": "measured.json", "num_nodes": 4})
    {'problem': 'my_task:make', 'network': 'measured.json'}
    """
    problem, network = arguments.get("problem"), arguments.get("network")
    leads = {
        "problem": isinstance(problem, str) and ":" in problem,
        "data": arguments.get("data") is not None,
        "network": _names_file(network),
    }
    return {name: arguments[name] for name, is_outside in leads.items() if is_outside}


def _names_file(network: Any) -> bool:
    if isinstance(network, str):
        return network.endswith(".json")
    if isinstance(network, Mapping):
        return any(map(_names_file, network.values()))
    return isinstance(network, list) and any(map(_names_file, network))


def resume_command(folder: str | os.PathLike[str], arguments: Mapping[str, Any]) -> str:
    """Return the command that resumes a comparison with these arguments in its folder.

    >>> resume_command("runs/mine", {"problem": "my_task:make"})
    'exogym compare --resume --out runs/mine --dataset my_task:make'
    """
    words = ["exogym", "compare", "--resume", "--out", os.fspath(folder)]
    for name, value in named_again(arguments).items():
        words += [f"--{OPTION.get(name, name)}", str(value)]
    return shlex.join(words)


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a run's or comparison's file. Raise ArgumentError if it is empty or unreadable."""
    try:
        found = read_file(path)
        if not found:
            raise ArgumentError("it is empty, or not a plain file")
    except (ArgumentError, OSError) as error:
        raise ArgumentError(f"{path} cannot be read ({error}): remove its folder, and train again") from error
    return found
