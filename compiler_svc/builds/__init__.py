"""Builds: running them in processes of their own (`runner`, `turns`, `shared`), and what happens in there.

Build processes are forked by `nursery_process`. What one does is `process`, which calls `compiler_svc.pipeline`, whose
stages are here. Only those import torch: `job`, `runner`, `nursery`, `turns`, `shared`, `plan` and `code_digest` are
the service's too. Must not know the wire.
"""
