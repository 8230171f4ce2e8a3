"""The targets, as data: everything in planning, lowering and execution that depends on the target.

    TARGETS["trn2"].tp_degrees                     registry: the targets, by kind
    find_format("aoti").executor                   registry: the executable formats, by name

A target names its lowering backends and executors as `module:function`, and each process that runs one imports it.
Knows bundles and this host's processor and programs. Must not know tensors, models, configurations or the wire.
"""
