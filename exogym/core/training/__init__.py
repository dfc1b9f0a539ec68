"""A strategy taken through training: drivers, the loop around them, and how a run is put together."""
