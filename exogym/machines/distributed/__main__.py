"""Run the self-test as a command: `python -m exogym.launch --nproc_per_node 2 -m exogym.distributed`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from exogym.core.base.files import replacing
from exogym.core.base.streams import STDERR
from exogym.errors import ArgumentError, DataError
from exogym.machines.distributed.group import destroy_process_group, get_distributed_info, init_process_group
from exogym.machines.distributed.measure import DEFAULT_SIZES_BYTES, self_test, table
from exogym.machines.distributed.probing import PROBED_BYTES, measure, step_seconds


def main() -> int:
    """Run the self-test in every process of the launcher, print its table on rank 0, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m exogym.launch --nproc_per_node N -m exogym.distributed",
        description="Check every collective against the known result, and measure its bandwidth and latency.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sizes_bytes", type=int, nargs="+", help="message sizes to measure, in bytes (default: 4 KiB to 16 MiB)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of timed calls per size (default 5)")
    parser.add_argument(
        "--json", metavar="FILE", help="file to which the measurement for --network is written; - prints it"
    )
    parser.add_argument(
        "--task", metavar="NAME", help="with --json: task whose step is also timed (a name or module:function)"
    )
    parser.add_argument("--batch-size", type=int, help="examples in the timed step (default: the task's)")
    parser.add_argument(
        "--data", metavar="PATH", help="file or folder with the task's data (default: its usual places)"
    )
    parser.add_argument("--task-options", metavar="TEXT", default="", help="options of the task, such as lora_rank=8")
    given = parser.parse_args()
    fields: dict[str, Any] = {}
    try:
        if given.json is None and given.task is not None:
            raise ArgumentError("--task needs --json FILE: the measured step is written only to this file")
        step_s, evaluation_s = (
            (None, None) if given.task is None
            else step_seconds(given.task, given.batch_size, given.data, given.task_options)
        )  # fmt: skip
        init_process_group()
        try:
            if given.json is None:
                rows = self_test(given.sizes_bytes or DEFAULT_SIZES_BYTES, given.repeats)
            else:
                rows, fields = measure(
                    given.sizes_bytes or PROBED_BYTES, given.repeats, step_s, given.task, evaluation_s
                )
            info = get_distributed_info()
        finally:
            destroy_process_group()
    except (ArgumentError, DataError) as error:
        print(f"exogym.distributed: error: {error}", file=STDERR)
        return 2
    if info["rank"] == 0 and given.json == "-":
        print(json.dumps(fields))
    elif info["rank"] == 0:
        if given.json is not None:
            with replacing(given.json) as file:
                file.write(json.dumps(fields) + "\n")
        print(f"{info['world_size']} processes, {info['backend']}; every result is correct\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
