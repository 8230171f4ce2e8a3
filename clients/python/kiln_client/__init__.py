"""Kiln's Python SDK: compile bundles, load them, generate with them.

There are asynchronous clients (`AsyncCompiler`, `AsyncBundles`, `AsyncRuntime`) and blocking ones with the same methods
(`Compiler`, `Bundles`, `Runtime`). Methods return the API's protobuf messages, whose fields the `.proto` files
describe; a whole generation is a frozen `Completion`. Methods raise `KilnError`.

Knows the generated stubs. Must not know the bundle format, the services' code, or torch.
"""

import os

# Prevents gRPC's core from writing to standard error about every connection that ends. The core reads the variable when
# `grpc` is imported, which the modules below do. A value that the user has set stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from kiln_client.blocking import Stream
from kiln_client.bundles import AsyncBundles
from kiln_client.compile_requests import CompileOptions, PlanOptions, compile_request, plan_request
from kiln_client.compiler import AsyncCompiler
from kiln_client.completion import Completion, CompletionBuilder, collect, collect_sequences
from kiln_client.endpoint import Timeouts, TlsOptions
from kiln_client.errors import FieldViolation, KilnError
from kiln_client.prompts import GenerateOptions, Prompt, chat
from kiln_client.runtime import AsyncRuntime
from kiln_client.streams import AsyncStream
from kiln_client.sync import Bundles, Compiler, Runtime
from kiln_client.version import __version__

__all__ = [
    "AsyncBundles",
    "AsyncCompiler",
    "AsyncRuntime",
    "AsyncStream",
    "Bundles",
    "CompileOptions",
    "Compiler",
    "Completion",
    "CompletionBuilder",
    "FieldViolation",
    "GenerateOptions",
    "KilnError",
    "PlanOptions",
    "Prompt",
    "Runtime",
    "Stream",
    "Timeouts",
    "TlsOptions",
    "__version__",
    "chat",
    "collect",
    "collect_sequences",
    "compile_request",
    "plan_request",
]
