"""Leaves these tests to `make test-xla`, which runs them in an environment of their own."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch_xla") else ["test_*.py"]
