"""OPT: learned positions that begin at row 2, norms before or after attention and MLP."""
