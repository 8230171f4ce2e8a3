"""What the service remembers: operations, versions, aliases, the action cache and digests of files.

Knows SQL and the records that are stored. Must not know the wire, blobs, or how a compile is done.
"""
