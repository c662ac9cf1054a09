"""Repeats become one cell, and cells are compared. May import read and labels."""
