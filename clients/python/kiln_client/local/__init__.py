"""A model on this host, for one person: finds it, starts the services of a home, configures, compiles and loads it.

`kiln run`, `kiln serve`, `kiln pull`, `kiln ps`, `kiln logs` and `kiln down` are made of it. Must not import the
services.
"""
