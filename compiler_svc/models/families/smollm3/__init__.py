"""SmolLM 3: some layers do not rotate queries and keys."""
