"""GPT-2: learned positions, and matrices that checkpoints store as [inputs, outputs]."""
