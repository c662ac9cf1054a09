"""How good the cost model is, on a list of measured cells. May import sweep and all below."""
