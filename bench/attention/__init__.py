"""Attention on one device, layouts, merging and ring sends. May import common and config."""
