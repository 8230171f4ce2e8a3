"""What a target is, as data: everything that planning, lowering and execution vary by target.

    TARGETS["trn2"].tp_degrees                     registry: the targets, by kind
    find_format("aoti").executor                   registry: the executable formats, by name

Lowering backends and executors are named here as `module:function`, and each process that runs one resolves the name
itself. Knows bundles and this host's processor and programs. Must not know tensors, models, configurations or the wire.
"""
