"""Ours against the packages, on one attention call. May import cell and all below."""
