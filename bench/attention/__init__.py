"""Attention on one device, and layouts, merging and sends of strategies. May import common and config."""
