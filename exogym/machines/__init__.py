"""Start processes on one or several machines, find and check hosts, and write job files for clusters."""
