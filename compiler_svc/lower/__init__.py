"""Lowers exported graphs to executables, each in a process of its own.

Knows graphs, compilers and processes. Must not know models, configurations, bundles, or where weights come from: an
executable holds no weights and lists the constants that it needs.
"""
