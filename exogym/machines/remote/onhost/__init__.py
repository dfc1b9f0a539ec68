"""What runs on a host. These files are sent there as text: they use the standard library of Python 3.7 only."""
