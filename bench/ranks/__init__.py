"""Device, process groups, progress log and memory limit of a rank. May import common and config."""
