"""Files from folders: only regular ones are opened, and an index leads nowhere else."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corrupted import impatient

from exogym.core.base.files import check_regular, indexed, opened_regular, regular_text
from exogym.errors import ExoGymError
from exogym.home.whisper.ctranslate2 import read_variables
from exogym.machines.remote.results import facts_of
from exogym.machines.remote.results import names as names_of_results

NOT_REGULAR = "is a folder, a pipe or a device, but must be a regular file"


def test_only_regular_files_and_links_to_them_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("wörds")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert regular_text(tmp_path / name) == "wörds"
        with opened_regular(tmp_path / name) as file:
            assert file.read(1) == b"w"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "to-pipe", tmp_path, Path("/dev/zero")):
        for use in (check_regular, opened_regular, regular_text):
            with impatient(), pytest.raises(OSError, match=NOT_REGULAR):
                use(path)
    with pytest.raises(FileNotFoundError):
        check_regular(tmp_path / "none")


def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    folder, index = tmp_path / "model", tmp_path / "model" / "x.index.json"
    folder.mkdir()
    (tmp_path / "outside").write_text("")
    (folder / "a").write_text("")
    (folder / "b").symlink_to("../outside")
    index.write_text(json.dumps({"weight_map": {"x": "b", "y": "a", "z": "b"}}))
    assert indexed(index) == [folder / "a", folder / "b"]
    odd: list[Any] = [
        "../outside",
        str(tmp_path / "outside"),
        "..",
        ".",
        "",
        "sub/a",
        "..\\outside",
        "C:a",
        "a\0",
        3,
        None,
    ]
    for name in odd:
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ValueError, match=r"is named in .*, but is not in this folder"):
            indexed(index)


FOLDERS: list[tuple[str, Callable[[Path], object]]] = [
    ("model.bin", lambda folder: read_variables(folder / "model.bin")),
    (names_of_results(1)[2], lambda folder: facts_of(folder, 1)),
]


@pytest.mark.parametrize(("name", "read"), FOLDERS, ids=[name for name, _ in FOLDERS])
def test_a_pipe_in_a_folder_of_results_is_an_error(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with impatient(), pytest.raises(ExoGymError, match=NOT_REGULAR):
        read(tmp_path)
