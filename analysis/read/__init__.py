"""Computes metrics from records and puts them into one table. May import labels."""
