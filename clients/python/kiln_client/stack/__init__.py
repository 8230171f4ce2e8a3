"""Both services on one host, as child processes of `kiln up`.

Knows how to start, watch and stop `python -m compiler_svc` and `python -m runtime_svc`. Must not import them.
"""
