"""ExoGym's internal code. Import the public modules next to this package; internal modules may move."""
