from tests.ranks.toy_bundles import forkservers, toy, toy_directory

__all__ = ["forkservers", "toy", "toy_directory"]
