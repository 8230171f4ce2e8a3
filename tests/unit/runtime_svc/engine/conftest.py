from tests.ranks.engines import is_async, shards, start_engine

__all__ = ["is_async", "shards", "start_engine"]
