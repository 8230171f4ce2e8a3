"""Phi-3, 3.5 and 4: checkpoints with fused projections, LongRoPE, heads that may be rotated in part."""
