"""What everything stands on: random streams, files, devices."""
