"""Functions that convert messages of the API to values and back. Must not make decisions."""
