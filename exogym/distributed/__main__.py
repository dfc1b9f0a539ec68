"""The self-test as a command: `python -m exogym.launch --nproc_per_node 2 -m exogym.distributed`."""

from __future__ import annotations

import argparse
import sys

from exogym.distributed.group import destroy_process_group, get_distributed_info, init_process_group
from exogym.distributed.measure import DEFAULT_SIZES_BYTES, self_test, table
from exogym.errors import ArgumentError


def main() -> int:
    """Run the self-test in the world that the launcher made, and print the table on rank 0; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m exogym.launch --nproc_per_node N -m exogym.distributed",
        description="Check every collective against the known result, and measure its bandwidth and latency.",
        allow_abbrev=False,
    )
    parser.add_argument("--sizes_bytes", type=int, nargs="+", help="sizes to measure (default 4 KiB, 1 MiB and 16 MiB)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each size (default 5)")
    given = parser.parse_args()
    try:
        init_process_group()
        try:
            rows = self_test(given.sizes_bytes or DEFAULT_SIZES_BYTES, given.repeats)
            info = get_distributed_info()
        finally:
            destroy_process_group()
    except ArgumentError as error:
        print(f"exogym.distributed: error: {error}", file=sys.stderr)
        return 2
    if info["rank"] == 0:
        print(f"{info['world_size']} processes, {info['backend']}; every result is right\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
