"""Predicted cells and the modelled time of links. May import cell and all below; nothing below imports it."""
