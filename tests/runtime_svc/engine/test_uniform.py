import struct

from hypothesis import given
from hypothesis import strategies as st

from runtime_svc.engine.inputs import uniform


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_float32_holds_the_number_and_it_is_below_one(seed: int, index: int) -> None:
    number = uniform(seed, index)
    assert struct.unpack("f", struct.pack("f", number))[0] == number
    assert 0 <= number < 1


def test_numbers_never_change() -> None:
    """A client's seed must reproduce its tokens after every release."""
    numbers = [uniform(seed, index) for seed, index in [(0, 0), (0, 1), (7, 0), (2**64 - 1, 2**31)]]
    assert numbers == [0.12311941385269165, 0.5826717615127563, 0.48232781887054443, 0.3066132664680481]


def test_numbers_are_spread_evenly() -> None:
    counts = [0] * 16
    for seed in range(40):
        for index in range(100):
            counts[int(uniform(seed, index) * 16)] += 1
    assert sum((count - 250) ** 2 / 250 for count in counts) < 37.7, "chi squared, p = 0.001 at 15 degrees of freedom"
