"""The service's database: operations, versions, aliases, leases, the action cache and digests of files.

Knows SQL and the stored records. Must not know the wire, blobs, or how compiles run.
"""
