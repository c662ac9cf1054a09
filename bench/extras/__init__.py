"""Optional parts that no other package of bench imports. May import run and all below."""
