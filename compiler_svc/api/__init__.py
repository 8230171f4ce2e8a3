"""The gRPC services of the compiler. No other package of the compiler knows protobuf.

A handler validates, calls and converts. `*_wire` modules convert messages to records and back.
"""
