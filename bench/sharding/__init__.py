"""How fast shards are written, and in how much memory: a checkpoint of many gigabytes, tensor-parallel over 8 ranks.

    .venv/bin/python -m bench.sharding [--gigabytes 16]        writes bench/sharding/RESULTS.md

The peer is a plain loop that reads the checkpoint's files, hashes each byte once and writes it to other files, in as
many threads. The checkpoint is made for the run and removed after it; it needs a bit more than
twice its size on the disk.
"""
