"""`python -m exogym` is the command line."""

import sys

from exogym.cli import main

if __name__ == "__main__":
    sys.exit(main())
