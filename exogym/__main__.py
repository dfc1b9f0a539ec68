"""`python -m exogym`: the same command line as `exogym`. Ctrl-C ends it with one line, even while it loads."""

import sys


def main() -> int:
    """Run the command line and return the exit status."""
    try:
        from exogym.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("exogym: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
