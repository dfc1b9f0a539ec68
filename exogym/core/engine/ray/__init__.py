"""Some rows in each of several actors on a cluster of Ray's; this process holds none."""

from exogym.core.engine.ray.engine import Ray

__all__ = ["Ray"]
