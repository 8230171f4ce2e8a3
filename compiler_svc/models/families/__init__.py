"""Model families: for each a folder with `config` (what its `config.json` says, described without torch) and `model`
(the module, with torch). A family uses the layers of `models.layers` and knows no other family.
"""
