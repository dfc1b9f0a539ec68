"""The page over run folders: `serve` answers a browser on this machine, and reads what `exogym.runs` reads.

>>> import tempfile
>>> from pathlib import Path
>>> def ready(address: str) -> None:  # with the token behind it
...     print(address.startswith("http://127.0.0.1:"))
...     raise KeyboardInterrupt
>>> with tempfile.TemporaryDirectory() as folder:
...     try:
...         serve(Path(folder), ready=ready)  # answers until interrupted
...     except KeyboardInterrupt:
...         print("ended")
True
ended
"""

from exogym.ui.server import serve

__all__ = ["serve"]
