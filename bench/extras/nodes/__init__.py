"""Ranks on other machines: an agent on each of them, and its link. May import what lies below extras."""
