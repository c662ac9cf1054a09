"""A rank's device, process groups, log and memory limit. May import common and config."""
