"""Stacks of a run share bundles: what one compiled, the others import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers.shared_bundles import digest_action
from tests.servers.stack import Stack
from tests.system.conftest import TINY
from tests.system.runtime_process import SMALL_CONFIG


def test_a_bundle_is_compiled_once(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stack.shared is not None
    first = stack.provide("shared", TINY, SMALL_CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(Stack, "compile", lambda *_, **__: pytest.fail("compiled again"))
        assert stack.provide("shared-again", TINY, SMALL_CONFIG) == first
    assert stack.kiln("bundles", "show", "shared-again").last["digest"] == first


def test_what_a_file_leaves_is_named_and_taken(stack: Stack) -> None:
    stack.provide("left", TINY, SMALL_CONFIG)
    assert stack.take_left() == []
    stack.kiln("load", "left", "--deployment", "forgotten")
    assert stack.take_left()[:2] == ["1 held cores", "deployment forgotten"]
    assert stack.take_left() == []


def test_what_differs_is_not_shared(tmp_path: Path) -> None:
    config = {"neuron_config": {"seq_len": 64}}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    digests = {digest_action(model, config, level) for level in (0, 0, 1)}
    digests.add(digest_action(model, {"neuron_config": {"seq_len": 65}}, 0))
    (model / "config.json").write_text("{ }")
    digests.add(digest_action(model, config, 0))
    assert len(digests) == 4
