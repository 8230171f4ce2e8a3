"""What a compile would make and take, from configuration and tensor headers alone: memory, sizes that fit, cost.

Knows neither torch nor the wire. Nothing here reads a weight, traces a graph or starts a process.
"""
