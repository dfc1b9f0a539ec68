"""Real machines: start processes on one or several, find and check hosts, write job files for clusters."""
