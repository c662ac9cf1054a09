"""Command-line words become legal cells. May import measure and all below; no torch."""
