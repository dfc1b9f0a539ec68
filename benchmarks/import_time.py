"""Time that `import exogym` and a first short run add to `import torch`: the median over 9 new processes, in ms.

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
imported = time.perf_counter()
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
model, data = small_problem()
trainer = exogym.LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy("adamw", lr=0.01, H=5), num_nodes=2, max_steps=10, batch_size=8, device="cpu")
print(middle - start, imported - middle, time.perf_counter() - imported)
"""
NAMES = "import torch", "import exogym, after it", "a first run, after both"


def start_s(cache: str) -> tuple[float, ...]:
    """Return the seconds for each of `NAMES` in a new process that keeps its bytecode in `cache`."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    done = subprocess.run([sys.executable, "-c", CLOCK], check=True, capture_output=True, text=True, env=environment)
    return tuple(map(float, done.stdout.split()))


def main() -> None:
    """Print the medians."""
    with tempfile.TemporaryDirectory() as cache:
        start_s(cache)  # fills the bytecode cache
        runs = [start_s(cache) for _ in range(RUNS)]
    for name, column in zip(NAMES, zip(*runs, strict=True), strict=True):
        values = [1e3 * seconds for seconds in column]
        print(f"{name:24} {statistics.median(values):8.1f} ms  ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
