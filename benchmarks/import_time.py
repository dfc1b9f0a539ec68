"""What `import exogym` adds to `import torch`: the median over 7 pairs of fresh processes, in ms.

Run it on a quiet machine: python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys

PAIRS = 7
CLOCK = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def import_s(modules: str) -> float:
    """Return the seconds that `import <modules>` takes in a fresh process."""
    code = CLOCK.format(modules)
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the three medians."""
    import_s("torch, exogym")  # fills the file cache and the bytecode cache
    pairs = [(import_s("torch"), import_s("torch, exogym")) for _ in range(PAIRS)]
    added_ms = [1e3 * (both - torch_only) for torch_only, both in pairs]
    spread = f"{PAIRS} pairs: {min(added_ms):.1f} to {max(added_ms):.1f}"
    print(f"import torch            {1e3 * statistics.median(a for a, _ in pairs):8.1f} ms")
    print(f"import torch, exogym    {1e3 * statistics.median(b for _, b in pairs):8.1f} ms")
    print(f"exogym adds             {statistics.median(added_ms):8.1f} ms  ({spread})")


if __name__ == "__main__":
    main()
