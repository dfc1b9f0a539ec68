"""What `import exogym` adds to `import torch`: the median over 9 fresh processes, in ms.

Run it on a quiet machine: python benchmarks/import_time.py
"""

import os
import statistics
import subprocess
import sys
import tempfile

RUNS = 9
CLOCK = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import exogym
print(middle - start, time.perf_counter() - middle)
"""


def import_s(cache: str) -> tuple[float, float]:
    """Return the seconds that torch, and then exogym, take in a fresh process that keeps its bytecode in `cache`."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    done = subprocess.run([sys.executable, "-c", CLOCK], check=True, capture_output=True, text=True, env=environment)
    torch_s, exogym_s = done.stdout.split()
    return float(torch_s), float(exogym_s)


def main() -> None:
    """Print the medians."""
    with tempfile.TemporaryDirectory() as cache:
        import_s(cache)  # fills the bytecode cache
        runs = [import_s(cache) for _ in range(RUNS)]
    for name, column in zip(("import torch", "import exogym, after it"), zip(*runs, strict=True), strict=True):
        values = [1e3 * seconds for seconds in column]
        print(f"{name:24} {statistics.median(values):8.1f} ms  ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
