import msgspec
import pytest

from bundle.errors import ManifestInvalid
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow
from runtime_svc.engine.scheduler.prefix_buckets import CachedPrompt
from tests.ranks.fakes import make_manifest
from tests.ranks.scheduling import make_request

TABLE = BucketTable.from_manifest(make_manifest(prompt_buckets=(32, 8, 16), token_buckets=(64, 16)))


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_prompt_takes_the_smallest_bucket_that_holds_it(num_tokens: int, bucket: int) -> None:
    choice = TABLE.for_prompts([CachedPrompt(num_tokens, 0)])
    assert choice is not None
    assert choice.executable.bucket == (bucket,)


@pytest.mark.parametrize(("position", "bucket"), [(0, 16), (14, 16), (15, 16), (16, 64), (63, 64)])
def test_token_takes_the_smallest_bucket_beyond_its_position(position: int, bucket: int) -> None:
    row = ScheduledRow(0, make_request("a", 1), position, 1, Placement((0,)), samples=True)
    assert TABLE.for_tokens([row]).bucket == (bucket,)


def test_longest_prompt_is_that_of_the_largest_bucket() -> None:
    assert TABLE.max_prompt_tokens == 32


def test_executables_that_do_not_cover_the_limits_are_refused() -> None:
    whole = make_manifest(num_slots=2)
    prompts_only = msgspec.structs.replace(whole, executables=whole.executables_of("context_encoding"))
    with pytest.raises(ManifestInvalid, match="no executable of token_generation"):
        BucketTable.from_manifest(prompts_only)
    with pytest.raises(ManifestInvalid, match="no executable of context_encoding"):
        BucketTable.from_manifest(msgspec.structs.replace(whole, executables=whole.executables_of("token_generation")))
    short = [executable for executable in whole.executables if executable.tag != "token_generation_64"]
    with pytest.raises(ManifestInvalid, match="token_generation_16 is the largest bucket"):
        BucketTable.from_manifest(msgspec.structs.replace(whole, executables=tuple(short)))
    wide = msgspec.structs.replace(whole.limits, tkg_batch_size=3)
    with pytest.raises(ManifestInvalid, match="2 rows; the limits say 3"):
        BucketTable.from_manifest(msgspec.structs.replace(whole, limits=wide))
