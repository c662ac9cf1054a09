"""What the cells say, in sentences. May import cells, read and labels."""
