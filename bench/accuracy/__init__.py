"""Predictions beside measurements: how well the cost model does on a list of cells. Starts sweeps."""
