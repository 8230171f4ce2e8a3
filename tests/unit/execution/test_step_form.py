"""Rows of tokens as the inputs of executables."""

from __future__ import annotations

from bundle.abi.inputs import COMPUTED_CONTEXT, LIVE_ROWS
from bundle.consistency import check_consistency
from bundle.manifest import Manifest
from bundle.manifest_parser import parse_manifest
from execution.step import StepForm
from tests.bundles.manifests import make_manifest
from tests.ranks.step_values import list_values

FLAGS = ("tokens", COMPUTED_CONTEXT, LIVE_ROWS)


def make_blocks() -> Manifest:
    """8 blocks of 4 positions; sequences of up to 16 tokens; prompts of 8."""
    buckets = {"prompt_buckets": (8,), "token_buckets": (16,)}
    return make_manifest(flags=FLAGS, num_slots=3, ctx_batch_size=2, num_blocks=8, block_tokens=4, **buckets)


def test_a_chunk_is_written_to_the_blocks_of_its_positions() -> None:
    manifest = make_blocks()
    form = StepForm(manifest, manifest.executables_of("context_encoding")[0])
    inputs = form.make_idle()
    form.put_tokens(inputs, 0, [11, 12, 13], start=6, blocks=(5, 2, 7))
    assert list_values(inputs) == {
        "input_ids": [11, 12, 13, *[0] * 13],
        "position_ids": [6, 7, 8, *[0] * 13],
        "slot_mapping": [2 * 4 + 2, 2 * 4 + 3, 7 * 4, *[8 * 4] * 13],
        "active_block_table": [5, 2, 7, 8, *[8] * 4],
        "num_tokens": [3, 1],
        "computed_context_lens": [6, 0],
        "live_rows": [1],
    }


def test_one_token_a_row() -> None:
    manifest = make_blocks()
    form = StepForm(manifest, manifest.executables_of("token_generation")[0])
    inputs = form.make_idle()
    form.put_tokens(inputs, 1, [12], start=4, blocks=(0, 6))
    form.put_tokens(inputs, 0, [11], start=3, blocks=(1,))
    assert list_values(inputs) == {
        "input_ids": [11, 12, 0],
        "position_ids": [3, 4, 0],
        "slot_mapping": [1 * 4 + 3, 6 * 4, 8 * 4],
        "active_block_table": [1, 8, 8, 8, 0, 6, 8, 8, *[8] * 4],
        "live_rows": [2],
    }


def test_manifests_with_blocks_are_read_and_those_without_say_nothing_of_them() -> None:
    manifest = make_blocks()
    parsed = parse_manifest(manifest.to_json())
    check_consistency(parsed)
    assert (parsed.state.num_rows, parsed.state.block_tokens) == (8, 4)
    assert parsed.state.tensors[0].axes == ("block", "kv_head", "position", "head_dim")
    slots = make_manifest(num_slots=3)
    assert slots.state.num_rows == 3
    assert b"block" not in slots.to_json()
