"""Executors run the executables of one rank: `aoti` compiled libraries, `eager` exported programs, on `host` memory.

They hold weights and state, check arguments and know nothing of processes or of other ranks. A format of executables
names its executor, in `targets`; nothing else imports one.
"""
