"""Collective operators of tensor-parallel ranks: registered with torch, carried out through shared memory."""
