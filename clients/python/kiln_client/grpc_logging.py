"""Keeps gRPC's core from remarking on standard error on every connection that ends.

The core reads the variable when `grpc` is imported, so this comes first. A value that is set already stays.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
