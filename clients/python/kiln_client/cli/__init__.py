"""The `kiln` command line: one module per group of commands.

Every command runs one coroutine with the SDK's clients and shows its outcome through `output`, for a person or as JSON.
Must not know how the SDK talks to a server.
"""
