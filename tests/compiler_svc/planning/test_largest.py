import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.planning.largest import Judgement, find_largest


def judge_up_to(limit: int, *, least: int = 1, most: int = 2**31 - 1) -> object:
    def judge(size: int) -> Judgement:
        if not least <= size <= most:
            return Judgement.ILLEGAL
        return Judgement.FITS if size <= limit else Judgement.EXCEEDS

    return judge


@given(limit=st.integers(0, 2**31 - 1), configured=st.integers(1, 2**31 - 1))
def test_the_largest_is_found_from_anywhere(limit: int, configured: int) -> None:
    assert find_largest(judge_up_to(limit), configured) == limit


@given(data=st.data(), least=st.integers(1, 1000), span=st.integers(0, 1000), limit=st.integers(0, 3000))
def test_only_legal_sizes_count(data: st.DataObject, least: int, span: int, limit: int) -> None:
    configured = data.draw(st.integers(least, least + span))
    found = find_largest(judge_up_to(limit, least=least, most=least + span), configured)
    assert found == (min(limit, least + span) if limit >= least else 0)


@given(limit=st.integers(0, 10_000), step=st.integers(1, 64), count=st.integers(1, 200))
def test_sizes_come_in_steps(limit: int, step: int, count: int) -> None:
    def judge(size: int) -> Judgement:
        assert size % step == 0
        return Judgement.FITS if size <= limit else Judgement.EXCEEDS

    assert find_largest(judge, count * step, step=step) == limit // step * step


@pytest.mark.parametrize("configured", [1, 128, 2**31 - 1])
def test_few_sizes_are_judged(configured: int) -> None:
    judged = []

    def judge(size: int) -> Judgement:
        judged.append(size)
        return Judgement.FITS if size <= 100_000 else Judgement.EXCEEDS

    assert find_largest(judge, configured) == 100_000
    assert len(judged) < 64
