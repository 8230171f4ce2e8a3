"""Both services on one host, as child processes of `kiln up`, of `kiln serve`, or of a process in the background.

The package starts, watches and stops `python -m compiler_svc` and `python -m runtime_svc`, and records where they
listen. Must not import them.
"""
