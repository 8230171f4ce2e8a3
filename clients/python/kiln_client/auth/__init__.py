"""Bearer tokens of clients: where they are found, and how calls carry them."""
