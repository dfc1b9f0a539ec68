"""Services that all other packages use: random streams, files, locks, devices."""
