"""The commands that talk to a service."""

from __future__ import annotations

from typing import Final

#: Arguments that make each command call its service; `-` stands for a configuration.
CALLS: Final = {
    ("compile",): ("-", "--model", "m", "--name", "n"),
    ("plan",): ("-", "--model", "m"),
    ("shard-weights",): ("tiny", "--model", "m", "--name", "n"),
    ("quantize",): ("m", "--output", "m8"),
    ("bundles", "list"): (),
    ("bundles", "show"): ("tiny",),
    ("bundles", "read"): ("tiny", "graphs.jsonl.gz", "--out", "graphs.jsonl.gz"),
    ("bundles", "alias"): ("tiny", "prod"),
    ("bundles", "give"): ("tiny", "bob"),
    ("bundles", "delete"): ("tiny:v1",),
    ("bundles", "lease"): ("tiny", "--holder", "h"),
    ("bundles", "release"): ("--holder", "h"),
    ("bundles", "leases"): (),
    ("bundles", "gc"): (),
    ("bundles", "import"): ("/import/store", "--name", "n"),
    ("config", "show"): ("tiny",),
    ("config", "export"): ("tiny",),
    ("load",): ("tiny", "--deployment", "d"),
    ("unload",): ("d",),
    ("status",): (),
    ("generate",): ("--deployment", "d", "--prompt", "x"),
    ("load-weights",): ("d", "tiny"),
    ("adapters", "shard"): ("pirate", "--executables", "tiny", "--name", "n"),
    ("adapters", "list"): ("--deployment", "d"),
    ("adapters", "load"): ("tiny", "--deployment", "d"),
    ("adapters", "unload"): ("pirate", "--deployment", "d"),
    ("reset-kv",): ("d",),
    ("sessions",): ("d",),
    ("embed",): ("--deployment", "d", "--prompt", "x"),
    ("tokenize",): ("--deployment", "d", "--prompt", "x"),
    ("operations", "list"): (),
    ("operations", "cancel"): ("operations/1",),
    ("operations", "wait"): ("operations/1",),
}
