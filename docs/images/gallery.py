"""Train the comparisons of docs/evidence.md, and write a picture and a verdict of each into docs/images/gallery/.

python docs/images/gallery.py            all, in about five minutes on one core
python docs/images/gallery.py delay      some of them
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PICTURES = HERE / "gallery"
PAGE = HERE.parent / "evidence.md"


def commands() -> dict[str, tuple[list[str], str]]:
    """Return the page's pictures: name to the words of its command, and the file that the command writes."""
    found, words = {}, []
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("exogym compare"):
            words = line.split()[1:]
        elif "](images/gallery/" in line:
            name = line.partition("](images/gallery/")[2].removesuffix(".svg)")
            found[name] = words, f"loss_vs_{name.rpartition('_')[2]}.svg"
    return found


def main(names: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, (words, file) in commands().items():
        if names and name.rpartition("_")[0] not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", "exogym", *words, "--out", folder], check=True, stdout=subprocess.PIPE, text=True
            )
            print(name, done.stdout, sep="\n", flush=True)
            (made,) = Path(folder).glob(f"*/{file}")
            shutil.copy(made, PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
