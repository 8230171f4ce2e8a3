"""From exported graphs to executables, each lowered in a process of its own.

    job = stage_job(traced.program, tag=…, num_state=…, options=…, directory=…, cache_dir=…)     staging
    executables = await LoweringPool(forkserver, …).lower(jobs, on_progress)                      pool

Lowering processes are forked by a forkserver that `pool` describes; what one does is `process`.

Knows graphs, compilers and processes. Must not know models, configurations, bundles, or where weights come from: an
executable holds none, and names the constants that it has to be given.
"""
