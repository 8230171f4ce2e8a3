"""Both services on one host, as child processes of `kiln up`.

The package starts, watches and stops `python -m compiler_svc` and `python -m runtime_svc`. Must not import them.
"""
