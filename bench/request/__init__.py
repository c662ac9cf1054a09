"""Words become legal cells. May import measure and all below; no torch."""
