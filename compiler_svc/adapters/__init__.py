"""Reads LoRA adapters as PEFT and NxD write them, fits them to a model, and writes each rank's part of them.

`config`, `directory` and `errors` need no torch. Must not know executables, the bundle's store or the service.
"""
