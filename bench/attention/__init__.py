"""Attention on one device, and layouts, merging and sends of strategies. May import record and all below."""
