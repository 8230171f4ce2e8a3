"""Plans steps: which requests compute how many tokens, by which executable. Knows no clock, no ranks and no streams."""
