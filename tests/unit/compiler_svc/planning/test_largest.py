import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.planning.largest import Verdict, find_largest


def check_up_to(limit: int, *, least: int = 1, most: int = 2**31 - 1) -> object:
    def check(size: int) -> Verdict:
        if not least <= size <= most:
            return Verdict.ILLEGAL
        return Verdict.FITS if size <= limit else Verdict.EXCEEDS

    return check


@given(limit=st.integers(0, 2**31 - 1), configured=st.integers(1, 2**31 - 1))
def test_the_largest_is_found_from_anywhere(limit: int, configured: int) -> None:
    assert find_largest(check_up_to(limit), configured) == limit


@given(data=st.data(), least=st.integers(1, 1000), span=st.integers(0, 1000), limit=st.integers(0, 3000))
def test_only_legal_sizes_count(data: st.DataObject, least: int, span: int, limit: int) -> None:
    configured = data.draw(st.integers(least, least + span))
    found = find_largest(check_up_to(limit, least=least, most=least + span), configured)
    assert found == (min(limit, least + span) if limit >= least else 0)


@given(limit=st.integers(0, 10_000), step=st.integers(1, 64), count=st.integers(1, 200))
def test_sizes_come_in_steps(limit: int, step: int, count: int) -> None:
    def check(size: int) -> Verdict:
        assert size % step == 0
        return Verdict.FITS if size <= limit else Verdict.EXCEEDS

    assert find_largest(check, count * step, step=step) == limit // step * step


@pytest.mark.parametrize("configured", [1, 128, 2**31 - 1])
def test_few_sizes_are_checked(configured: int) -> None:
    checked = []

    def check(size: int) -> Verdict:
        checked.append(size)
        return Verdict.FITS if size <= 100_000 else Verdict.EXCEEDS

    assert find_largest(check, configured) == 100_000
    assert len(checked) < 64
