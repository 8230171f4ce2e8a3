"""Executors run the executables of one rank in `host` memory: `aoti` compiled libraries, `eager` exported programs.

They hold weights and state, check arguments and must not know processes or other ranks. Each executable format in
`targets` names its executor; no other module imports one.
"""
