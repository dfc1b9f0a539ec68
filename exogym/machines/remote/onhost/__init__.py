"""Programs for hosts. They are sent as text, so they use only the standard library of Python 3.7."""
