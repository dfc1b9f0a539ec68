"""`python -m exogym` is the command line."""

from exogym.cli import main

if __name__ == "__main__":
    main()
