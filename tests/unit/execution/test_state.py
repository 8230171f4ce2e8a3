"""Where the state of a rank lies, and what memory it takes."""

from __future__ import annotations

import logging
import mmap
import os
from array import array
from pathlib import Path

import msgspec
import pytest
import torch

from bundle.abi.state import AXES, StateLayout, StateTensor
from execution.errors import SlotUnknown
from execution.executors.state import HUGE_PAGE_BYTES, RankState
from tests.bundles.manifests import make_state as make_state_layout

SLOTS, SLOT_BYTES = 7, 8 << 20
CHOICES = {"madvise": "always [madvise] never", "never": "always madvise [never]"}


def make_layout() -> StateLayout:
    """Two tensors of 8 slots of 4 MiB each."""
    return make_state_layout(SLOTS, 4, 4096, 64)


def make_state(tmp_path: Path, choice: str) -> RankState:
    file = tmp_path / "enabled"
    file.write_text(CHOICES[choice])
    return RankState(make_layout(), kernels_choice=file)


def read_resident_bytes(state: RankState) -> int:
    """What a state's tensors take of the host's memory: exactly, and nothing of the rest of the process."""
    pages = set()
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        for tensor in state.tensors.values():
            first, last = (at // mmap.PAGESIZE for at in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1))
            entries = array("Q", os.pread(file.fileno(), 8 * (last + 1 - first), 8 * first))
            # The highest bits say that a page is in memory, or in the swap.
            pages |= {page for page, entry in enumerate(entries, first) if entry >> 62}
    return len(pages) * mmap.PAGESIZE


def test_slots_of_a_float8_state_are_zeroed() -> None:
    tensors = tuple(msgspec.structs.replace(one, dtype="float8_e4m3fn") for one in make_layout().tensors)
    state = RankState(msgspec.structs.replace(make_layout(), tensors=tensors))
    assert state.size_bytes == (SLOTS + 1) * SLOT_BYTES // 4
    for tensor in state.tensors.values():
        tensor.fill_(1)
    assert state.zero([2]) == SLOT_BYTES // 4
    for tensor in state.tensors.values():
        assert [bool(slot.any()) for slot in tensor] == [slot != 2 for slot in range(SLOTS + 1)]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_state_is_zeroed_and_aligned(tmp_path: Path, choice: str) -> None:
    state = make_state(tmp_path, choice)
    assert state.size_bytes == (SLOTS + 1) * SLOT_BYTES
    for spec in make_layout().tensors:
        tensor = state.tensors[spec.name]
        assert tensor.shape == spec.shape
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()


def test_tensors_share_no_bytes(tmp_path: Path) -> None:
    state = make_state(tmp_path, "madvise")
    keys, values = state.tensors.values()
    keys.fill_(1)
    assert not values.any()
    assert state.zero([2]) == SLOT_BYTES
    assert keys.sum() == keys.numel() - keys[2].numel()


def test_slots_are_zeroed_by_number(tmp_path: Path) -> None:
    state = make_state(tmp_path, "madvise")
    for tensor in state.tensors.values():
        tensor.fill_(1)
    assert state.zero([2, 0, 2]) == 2 * SLOT_BYTES
    with pytest.raises(SlotUnknown):
        state.zero([1, SLOTS + 1])
    for tensor in state.tensors.values():
        assert [bool(row.any()) for row in tensor] == [slot not in (0, 2) for slot in range(SLOTS + 1)]
    assert state.zero([]) == 0
    assert state.zero(None) == state.size_bytes
    assert not any(tensor.any() for tensor in state.tensors.values())


def test_slots_that_nobody_held_take_no_memory(tmp_path: Path) -> None:
    state = make_state(tmp_path, "madvise")
    assert read_resident_bytes(state) == 0
    for tensor in state.tensors.values():
        tensor[3] = 1
    # A page may reach into the neighbours at both ends of each of the two tensors' slots.
    assert SLOT_BYTES <= read_resident_bytes(state) <= SLOT_BYTES + 4 * HUGE_PAGE_BYTES


@pytest.mark.parametrize("choice", CHOICES)
def test_committing_takes_all_memory_and_keeps_what_is_there(tmp_path: Path, choice: str) -> None:
    state = make_state(tmp_path, choice)
    for number, tensor in enumerate(state.tensors.values()):
        tensor[number] = 1 + number
    state.commit()
    assert read_resident_bytes(state) >= state.size_bytes
    for number, tensor in enumerate(state.tensors.values()):
        assert (tensor[number] == 1 + number).all()
        assert tensor.count_nonzero() == tensor[number].numel()


def test_pages_are_huge_where_the_kernel_gives_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert make_state(tmp_path, "madvise").page_bytes == HUGE_PAGE_BYTES
    assert not caplog.records


def test_the_log_says_why_pages_are_small(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        state = make_state(tmp_path, "never")
        RankState(make_layout(), kernels_choice=tmp_path / "missing")
    assert state.page_bytes == mmap.PAGESIZE
    never, missing = (record.getMessage() for record in caplog.records)
    assert never == f"the KV cache of 64 MiB lies in small pages: {tmp_path / 'enabled'} says never"
    assert "No such file" in missing


def test_a_small_cache_asks_for_no_huge_page(tmp_path: Path) -> None:
    layout = StateLayout(
        tensors=(StateTensor(name="k", dtype="bfloat16", shape=(3, 2, 5, 7), axes=AXES),),
        num_slots=2,
        kv_heads_by_rank=((0, 1),),
    )
    state = RankState(layout, kernels_choice=tmp_path / "missing")
    assert state.page_bytes == mmap.PAGESIZE
    assert state.tensors["k"].dtype == torch.bfloat16
