"""The Ray engine: each of several actors holds some rows, and this process holds none."""

from exogym.clusters.ray.engine import Ray

__all__ = ["Ray"]
