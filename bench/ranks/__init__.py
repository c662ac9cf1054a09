"""Where a rank stands and what it does. May import the nouns only."""
