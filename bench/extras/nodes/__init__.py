"""Ranks on other machines: an agent on each, and the link to it. May import what lies below extras."""
