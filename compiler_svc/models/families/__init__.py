"""Model families, one file each, without torch: what their `config.json` says, and what their models consist of.

A family knows no other. `registry` finds each `Family` in this folder.
"""
