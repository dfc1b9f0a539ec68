"""The bytes that the communicator records are those that the network interface counts, one node per process."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "wire_bytes.py"


def run(*given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *given], capture_output=True, text=True, timeout=300, check=False
    )


def test_every_strategy_sends_what_is_recorded():
    done = run("--nodes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 18


def test_a_difference_is_noticed():
    """The control: headers and greetings alone are more than one in a hundred thousand."""
    done = run("--nodes", "2", "--strategies", "diloco", "--limit", "1e-5")
    assert done.returncode == 1 and "off, more than" in done.stderr
