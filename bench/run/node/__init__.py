"""Start and stop the rank processes of a cell on one machine. May import what lies below run."""
