"""What `kiln doctor` does: checks whether this host compiles for a target and runs what it has compiled."""
