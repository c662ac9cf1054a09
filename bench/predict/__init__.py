"""Predicted cells and the modelled time of links. May import cell and all below; no core package imports it."""
