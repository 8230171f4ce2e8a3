"""Benchmarks: figures beside a peer or a limit measured in the same run. Never part of a test.

    .venv/bin/python -m bench [--quick]           writes RESULTS.md
    .venv/bin/python -m bench.peers.install       once, before: puts the peers into a virtual environment of their own

Everything that is compared is measured in turns, in processes that live for the whole run and wait while others measure
(`worker`), so that what else the machine does falls on all alike. Knows everything; nothing knows it.
"""
