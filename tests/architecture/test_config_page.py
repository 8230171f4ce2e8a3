"""docs/config.md says what the tables do."""

from tests.architecture.config_table import PAGE, render_page


def test_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render_page(), "run `make docs`"
