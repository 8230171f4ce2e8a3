"""Benchmarks: figures beside a peer or a limit measured in the same run. Never part of a test.

    .venv/bin/python -m bench                     writes RESULTS.md; --large: 1.1 B parameters, writes RESULTS-large.md
    .venv/bin/python -m bench --formats           quantized weights and caches, writes RESULTS-formats.md
    .venv/bin/python -m bench --quick             tries all of it with tiny models, writes .kiln/RESULTS-quick.md
    .venv/bin/python -m bench.peers.install       once, before: puts the peers into virtual environments of their own

Engines that are compared take turns, in processes that live for the whole run and wait while others measure (`worker`),
so that other load of the machine affects all of them alike. The benchmark may import every package; none imports it.
"""
