"""`python -m exogym` is the command line, as is `exogym`: Ctrl-C ends it in one line, while it is loaded too."""

import sys


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        from exogym.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("exogym: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
