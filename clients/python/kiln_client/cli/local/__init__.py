"""Commands about a home of this host: its services, its key, its models, and what answers with them.

May use the SDK's clients and `kiln_client.stack`.
"""
