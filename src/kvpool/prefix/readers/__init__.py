"""Who reads cached blocks, and how many nobody reads."""
