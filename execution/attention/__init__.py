"""The attention operator: its schema, and its reference in torch."""
