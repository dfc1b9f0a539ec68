"""The README for a package index: its links lead to the files of this version in the repository."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
REPOSITORY = "https://github.com/exo-explore/gym"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, version: str) -> str:
    """Return Markdown with relative links to files at the tag of a version; pictures as the files themselves."""
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({REPOSITORY}/{'raw' if m[1] else 'blob'}/v{version}/{m[3]})", text)


if __name__ == "__main__":
    init = (HERE / "exogym" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', init, re.M)
    readme = (HERE / "README.md").read_text("utf-8")
    setup(long_description=absolute(readme, version), long_description_content_type="text/markdown")
