"""The core: what only the house uses. Users import the faces beside it; a part of the core may move."""
