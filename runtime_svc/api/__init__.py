"""The gRPC services of the runtime, and what each of their methods needs of its caller.

A handler validates, calls and converts. `*_wire` modules convert messages to values and back, and make no decisions.
"""
