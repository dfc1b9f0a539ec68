"""ExoGym's internal code. Users import the public modules beside this package; internal modules may move."""
