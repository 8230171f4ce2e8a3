"""Exports models to graphs: one functional program per (submodel, bucket), called by the names of `bundle.abi`.

A compile goes

    checkpoint = Checkpoint.open(path)                                   weights.checkpoint
    description = describe_model(checkpoint.config)                      models.registry
    plan = plan_weights(description, checkpoint, dtype=…, …)             sharding.plan
    spec = GraphSpec(description=description, …)                         trace.graph_spec
    submodel = describe_submodel(spec, "context_encoding", bucket)       trace.submodels
    traced = export_submodel(spec, plan, submodel)                       trace.export     → compiler_svc.lower
    write_shards(plan, checkpoint, {rank: blob})                         sharding.writer
    check_golden(manifest, blob_path, checkpoint)                        golden.check

Must not know how graphs are lowered or stored. `graph_spec` and `submodels` need no torch.
"""
