"""What `kiln doctor` does: checks whether this host compiles for a target and runs what it has compiled.

CHECKS            checks: the rows, in the order in which they run
run_probe         probe: asks a module of another distribution, in a process of its own
OneLayerTrial     trial: compiles a model of one layer and runs it, by services of its own
write_checkpoint  one_layer: that model, and the logits that it must have
"""
