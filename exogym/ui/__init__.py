"""The page that shows run folders in a browser: `serve`. It reads the same files as `exogym.runs`.

>>> import tempfile
>>> from pathlib import Path
>>> def ready(address: str) -> None:  # the address ends with the token
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
