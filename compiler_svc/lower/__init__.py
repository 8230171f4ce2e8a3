"""Lowers exported graphs to executables, each in a process of its own.

    job = stage_job(traced.program, tag=…, num_state=…, options=…, directory=…, cache_dir=…)     staging
    executables = await LoweringPool(forkserver, …).lower(jobs, on_progress)                      pool

`pool` describes the forkserver of lowering processes; `process` is the code that runs in them.

Knows graphs, compilers and processes. Must not know models, configurations, bundles, or where weights come from: an
executable holds no weights and lists the constants that it needs.
"""
