"""Helpers for all packages: the machine, statistics, labels and rules. May import config."""
