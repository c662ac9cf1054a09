"""Compare Ulysses with Ring Attention: run cells, check them, time them, keep the records."""
