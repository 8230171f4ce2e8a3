from tests.ranks.toy_bundles import toy, toy_directory

__all__ = ["toy", "toy_directory"]
