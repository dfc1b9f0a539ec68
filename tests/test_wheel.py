"""The wheel that is built has what a package's page shows."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_has_the_readme_as_its_description(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "exogym", source / "exogym", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(archive.read(name).decode("utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    readme = (ROOT / "README.md").read_text("utf-8")
    assert text.strip().splitlines() == readme.strip().splitlines()
