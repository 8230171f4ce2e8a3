"""Collective operators of tensor-parallel ranks. They are registered with torch and exchange data in shared memory."""
