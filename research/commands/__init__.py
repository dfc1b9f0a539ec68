"""The commands of `python -m research`, a file each."""
