"""Prevents gRPC's core from writing to standard error about every connection that ends.

The core reads the environment variable when `grpc` is imported, so import this module first. A value that the user has
set stays.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
