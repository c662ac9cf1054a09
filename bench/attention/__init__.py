"""Attention on one device, and what strategies share. May import the nouns only."""
