"""Mistral 7B and its kin: every layer attends to a window of the latest positions."""
