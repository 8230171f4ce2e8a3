"""The services that clients call, and the only place of the compiler that knows protobuf.

A handler validates, calls and converts. `*_wire` modules convert messages to records and back.
"""
