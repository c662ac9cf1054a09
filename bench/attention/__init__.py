"""Attention on one device, and what strategies share. May import record and all below."""
