"""The golden check: before a bundle is published, its executables must compute what transformers computes.

Knows manifests, executors and the reference. Must not know how executables were made, or the store: the caller passes
the path of each blob.
"""
