import msgspec
import pytest

from bundle.abi.inputs import COMPUTED_CONTEXT, LIVE_ROWS
from bundle.errors import ManifestInvalid
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.scheduler.buckets import BucketTable, CachedPrompt
from runtime_svc.engine.scheduler.plan import ScheduledRow
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


def test_blocks_have_to_hold_the_longest_sequence() -> None:
    BucketTable.from_manifest(make_manifest(num_blocks=16, block_tokens=4))
    with pytest.raises(ManifestInvalid, match="15 blocks of 4 tokens; a sequence of limits"):
        BucketTable.from_manifest(make_manifest(num_blocks=15, block_tokens=4))


def test_requests_take_the_first_rows_unless_executables_read_their_own_slots_only() -> None:
    assert not BucketTable.from_manifest(make_manifest()).packs_rows
    assert BucketTable.from_manifest(make_manifest(flags=("tokens", LIVE_ROWS))).packs_rows
    assert BucketTable.from_manifest(make_manifest(num_blocks=16, block_tokens=4)).packs_rows
    fewer_rows = make_manifest(
        executables=make_manifest(num_slots=2).executables, state=make_manifest(num_slots=5).state
    )
    table = BucketTable.from_manifest(fewer_rows)
    assert (table.packs_rows, table.max_sequences, table.num_token_rows) == (True, 5, 2)


def test_tokens_take_the_fewest_rows_that_hold_them() -> None:
    batches = [
        msgspec.structs.replace(one, tag=f"{one.tag}_{rows}")
        for rows in (1, 2, 4)
        for one in make_manifest(num_slots=rows, token_buckets=(16, 64)).executables
        if one.submodel == "token_generation"
    ]
    prompts = make_manifest().executables_of("context_encoding")
    limits = make_manifest(num_slots=4).limits
    table = BucketTable.from_manifest(make_manifest(executables=[*prompts, *batches], limits=limits))
    rows = [ScheduledRow(row, make_request("a", 1), 20, 1, Placement((0,)), samples=True) for row in range(3)]
    tags = [table.for_tokens(rows[:count]).tag for count in (1, 2, 3)]
    assert tags == [f"token_generation_64_{num_rows}" for num_rows in (1, 2, 4)]


@pytest.mark.parametrize(
    ("flags", "num_cached", "room"),
    [((), 0, 16), ((), 6, 0), ((COMPUTED_CONTEXT,), 16, 16), ((COMPUTED_CONTEXT,), 60, 16)],
)
def test_room_behind_cached_tokens(flags: tuple[str, ...], num_cached: int, room: int) -> None:
    table = BucketTable.from_manifest(make_manifest(prompt_buckets=(8, 16), flags=("tokens", *flags)))
    assert table.find_room(num_cached) == room
    if room:
        choice = table.for_prompts([CachedPrompt(room, num_cached)])
        assert choice is not None
        assert (choice.executable.bucket, choice.num_moved) == ((16,), (0,))
