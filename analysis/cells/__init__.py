"""Reduces repeats to cells and compares cells. May import read and labels."""
