"""Clients name URLs below the operator's prefixes only, and only in a form that all programs read alike."""

from __future__ import annotations

import pytest

from compiler_svc.remote import urls
from compiler_svc.remote.errors import ModelUrlRefused, ModelUrlUnsupported
from compiler_svc.remote.urls import Scheme, check_prefix, check_url, find_prefix
from compiler_svc.settings import parse_settings
from edge.errors import OptionsInvalid

PREFIXES = ("file:///srv/models", "memory://", "hf://owner")


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("file:///srv/models/tiny", "file:///srv/models/tiny"),
        ("file:///srv/models/a/b/", "file:///srv/models/a/b"),
        ("file:///srv/models", "file:///srv/models"),
        ("memory://anything/at/all", "memory://anything/at/all"),
        ("hf://owner/name@main", "hf://owner/name@main"),
    ],
)
def test_urls_below_a_prefix(url: str, plain: str) -> None:
    assert check_url(url, PREFIXES) == plain


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc",
        "file:///srv/models-of-another/tiny",
        "file:///srv/models/../../etc",
        "file:///srv/models/./tiny",
        "file:///srv/models//tiny",
        "file:///srv/models/%2e%2e/%2e%2e/etc",
        "file:///srv/models/tiny?x=../..",
        "file:///srv/models/tiny#x",
        "file:///srv/models/tiny\n",
        "file:///srv/models/t\0ny",
        "file:///srv/models\\..\\etc",
        "FILE:///srv/models/tiny",
        "file://srv/models/tiny",
        "file://~/models/tiny",
        "simplecache::file:///srv/models/tiny",
        "file:///srv/models/x.zip::memory://x",
        "zip://x::file:///srv/models/x.zip",
        "hf://ownership/name",
        "hf://other/name",
        "s3://bucket/tiny",
        "://tiny",
        "memory://" + "x" * 3000,
    ],
)
def test_all_others_are_refused(url: str) -> None:
    with pytest.raises(ModelUrlRefused, match="a URL below file:///srv/models or memory:// or hf://owner, or a path"):
        check_url(url, PREFIXES)


def test_without_a_prefix_none_is_accepted() -> None:
    with pytest.raises(ModelUrlRefused, match="accepted: a path; --model-url PREFIX of the compiler accepts more"):
        check_url("memory://tiny", ())


@pytest.mark.parametrize("url", ["ftp://host/tiny", "https://host/tiny", "github://x/y"])
def test_schemes_that_do_not_exist(url: str) -> None:
    with pytest.raises(ModelUrlUnsupported, match="a URL with one of file://, memory://, hf://, s3://"):
        check_url(url, (url,))
    with pytest.raises(ValueError, match="with one of"):
        check_prefix(url)


def test_a_scheme_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(urls.SCHEMES, "s3", Scheme("package_that_nobody_has", "kiln-compiler[s3]"))
    with pytest.raises(ModelUrlUnsupported, match=r"pip install 'kiln-compiler\[s3\]'") as caught:
        check_url("s3://bucket/tiny", ("s3://bucket",))
    assert caught.value.violations[0].field == "model"
    with pytest.raises(ValueError, match=r"kiln-compiler\[s3\]"):
        check_prefix("s3://bucket")


def test_the_longest_prefix_counts() -> None:
    assert find_prefix("hf://a/b/c", ("hf://", "hf://a", "hf://a/bb", "hf://x")) == "hf://a"


REQUIRED = ["--address", "127.0.0.1:0", "--store", "s", "--cache", "/c", "--model-root", "m"]


def test_the_operator_names_prefixes() -> None:
    assert parse_settings(REQUIRED, {}).urls == urls.NO_URLS
    settings = parse_settings([*REQUIRED, "--model-url", "hf://owner/", "--model-url", "file:///srv/models"], {})
    assert settings.urls.prefixes == ("hf://owner", "file:///srv/models")
    assert str(settings.urls.directory) == "/c/checkpoints"
    assert settings.fetch_timeout_s == 3600


@pytest.mark.parametrize("prefix", ["/srv/models", "ftp://x", "file:///srv/../etc", "x::file:///srv", "file://srv"])
def test_prefixes_that_are_none(prefix: str) -> None:
    with pytest.raises(OptionsInvalid, match="model-url"):
        parse_settings([*REQUIRED, "--model-url", prefix], {})
