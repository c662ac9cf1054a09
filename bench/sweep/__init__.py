"""Cells in order, and what a person sees of them. May import experiments and all below."""
