"""Where a rank stands and what it does. May import the nouns at the top of bench only."""
