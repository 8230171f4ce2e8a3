import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.api.paging import choose_page_size, read_page_token, write_page_token
from compiler_svc.errors import PageTokenInvalid


@given(st.tuples(st.text(), st.integers(-(2**53), 2**53)))
def test_a_token_holds_its_key(key: tuple[str, int]) -> None:
    assert read_page_token(write_page_token(key), tuple[str, int]) == key


def test_the_first_page_needs_no_token_and_the_last_has_none() -> None:
    assert read_page_token("", tuple[str, int]) is None
    assert write_page_token(None) == ""


@given(st.text(min_size=1) | st.binary(min_size=1).map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_a_foreign_token_is_refused(token: str) -> None:
    with pytest.raises(PageTokenInvalid) as caught:
        read_page_token(token, tuple[str, int])
    assert caught.value.violations[0].field == "page_token"


@pytest.mark.parametrize(("asked", "given"), [(-1, 100), (0, 100), (1, 1), (1000, 1000), (1001, 1000)])
def test_page_sizes(asked: int, given: int) -> None:
    assert choose_page_size(asked) == given
