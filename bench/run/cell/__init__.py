"""Run one cell and make its record. May import node and what lies below run."""
