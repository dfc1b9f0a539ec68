"""Programs that the controller sends to hosts as text. They use only the standard library of Python 3.7."""
