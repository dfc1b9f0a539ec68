"""The README for a package index, with links to this version's files; and the same bytes from the same files."""

import calendar
import gzip
import os
import re
import tarfile
import time
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
REPOSITORY = "https://github.com/exo-explore/gym"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, version: str) -> str:
    """Return Markdown with relative links to files at the tag of a version; pictures as the files themselves."""
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({REPOSITORY}/{'raw' if m[1] else 'blob'}/v{version}/{m[3]})", text)


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of an archive without the time, owner and umask of this machine."""
    member.mtime, member.mode = int(os.environ["SOURCE_DATE_EPOCH"]), 0o755 if member.isdir() else 0o644
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


class Repeatable(sdist):
    """A source distribution that depends on its files alone."""

    def make_archive(
        self, base_name: str, format: str, root_dir: object = None, base_dir: str = "", **_: object
    ) -> str:
        assert format == "gztar" and root_dir is None
        path, at = f"{base_name}.tar.gz", int(os.environ["SOURCE_DATE_EPOCH"])
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", 9, file, at) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for each in [Path(base_dir), *sorted(Path(base_dir).rglob("*"))]:
                archive.add(each, each.as_posix(), recursive=False, filter=plain)
        return path


if __name__ == "__main__":
    init = (HERE / "exogym" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', init, re.M)
    (day,) = re.findall("^date-released: (.+)$", (HERE / "CITATION.cff").read_text("utf-8"), re.M)
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(calendar.timegm(time.strptime(day, "%Y-%m-%d"))))  # wheels heed it
    readme = (HERE / "README.md").read_text("utf-8")
    setup(
        long_description=absolute(readme, version),
        long_description_content_type="text/markdown",
        cmdclass={"sdist": Repeatable},
    )
