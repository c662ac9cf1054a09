"""Records become metrics, and metrics one table. May import labels."""
