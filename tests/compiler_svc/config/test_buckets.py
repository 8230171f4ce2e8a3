import pytest

from compiler_svc.config.buckets import choose_buckets, generate_buckets


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (64, (64,)),
        (128, (128,)),
        (181, (181,)),
        (182, (128, 182)),
        (256, (128, 256)),
        (513, (128, 256, 513)),
        (1000, (128, 256, 512, 1000)),
        (1500, (128, 256, 512, 1024, 1500)),
        (10240, (128, 256, 512, 1024, 2048, 4096, 10240)),
        (12000, (128, 256, 512, 1024, 2048, 4096, 8192, 12000)),
    ],
)
def test_generated_buckets_are_those_of_nxd_inference(longest: int, expected: tuple[int, ...]) -> None:
    assert generate_buckets(128, longest) == expected


def test_generated_buckets_ascend_and_end_at_the_longest() -> None:
    for longest in range(1, 5000):
        buckets = generate_buckets(128, longest)
        assert buckets[-1] == longest
        assert list(buckets) == sorted(set(buckets))


def test_a_list_wins_only_where_bucketing_is_on() -> None:
    assert choose_buckets(enabled=False, listed=(8, 16), longest=512) == (512,)
    assert choose_buckets(enabled=True, listed=(8, 16), longest=512) == (8, 16)
    assert choose_buckets(enabled=True, listed=(), longest=512) == (128, 256, 512)
