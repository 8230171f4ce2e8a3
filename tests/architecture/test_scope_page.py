"""docs/scopes.md says what the code does."""

from tests.architecture.scope_table import PAGE, render_page


def test_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render_page(), "run `make docs`"
