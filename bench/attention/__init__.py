"""Attention on one device, and what strategies share. May import the nouns at the top of bench only."""
