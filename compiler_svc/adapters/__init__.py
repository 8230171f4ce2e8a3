"""Reads LoRA adapters as PEFT and NxD write them.

`config` and `errors` need no torch. Must not know executables, the bundle's store or the service.
"""
