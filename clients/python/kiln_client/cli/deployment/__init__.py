"""Commands that ask the runtime, for deployments and for tokens."""
