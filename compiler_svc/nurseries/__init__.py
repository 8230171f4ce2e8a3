"""Nurseries: processes that have loaded what others need, and fork those.

`nursery` is the end of whoever wants a process, `fork_loop` what a nursery does. What a forked process is asked for is
a packet of bytes, which only those two know that it is between. Must not know builds, lowerings or torch.
"""
