"""The page over run folders: `serve` answers a browser on this machine, and reads what `exogym.runs` reads."""

from exogym.ui.server import serve

__all__ = ["serve"]
