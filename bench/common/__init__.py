"""The machine, statistics, labels and other helpers of all rooms. May import config."""
