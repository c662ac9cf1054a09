"""One cell in, one record out. May import node and what lies below run."""
