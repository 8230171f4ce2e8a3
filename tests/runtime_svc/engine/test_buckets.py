import pytest

from runtime_svc.engine.buckets import BucketTable
from tests.runtime_svc.fakes import make_manifest

TABLE = BucketTable.from_manifest(make_manifest(prompt_buckets=(32, 8, 16), token_buckets=(64, 16)))


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_prompt_takes_the_smallest_bucket_that_holds_it(num_tokens: int, bucket: int) -> None:
    assert TABLE.for_prompt(num_tokens).bucket == (bucket,)


@pytest.mark.parametrize(("position", "bucket"), [(0, 16), (14, 16), (15, 16), (16, 64), (63, 64)])
def test_token_takes_the_smallest_bucket_beyond_its_position(position: int, bucket: int) -> None:
    assert TABLE.for_position(position).bucket == (bucket,)


def test_limits_are_those_of_the_largest_buckets() -> None:
    assert (TABLE.max_prompt_tokens, TABLE.max_position) == (32, 63)
