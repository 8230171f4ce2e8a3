"""Builds: running them in processes of their own (`runner`, `turns`, `shared`), and what happens in there.

Build processes are forked by `nursery_process`, and the lowerings of all builds by a nursery that it forks
(`forked_lowerings`). What a build process does is `process`, which calls `compiler_svc.pipeline`, whose stages are
here. Only those import torch: `job`, `runner`, `turns`, `shared`, `plan` and `code_digest` are the service's too. Must
not know the wire.
"""
