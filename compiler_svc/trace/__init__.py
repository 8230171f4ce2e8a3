"""From a model to exported graphs: one functional program per (submodel, bucket), called by the names of `bundle.abi`.

A compile goes

    checkpoint = Checkpoint.open(path)                                   weights.checkpoint
    config = parse_model_config(checkpoint.config)                       models.registry
    plan = plan_weights(config, checkpoint, dtype=…, …)                  sharding.plan
    spec = ModelSpec(config=config, …)                                   trace.spec
    submodel = describe_submodel(spec, "context_encoding", bucket)       trace.submodels
    traced = export_submodel(spec, plan, submodel)                       trace.export     → compiler_svc.lower
    write_shard(plan, checkpoint, rank, blob)                            sharding.writer
    check_golden(manifest, blob_path, checkpoint)                        golden.check

Must not know how graphs are lowered or stored. `spec` and `submodels` need no torch.
"""
