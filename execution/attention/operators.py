"""The attention operator `kiln::attend`, and `kiln::attend_in_place`, which writes the caches that it gets.

Importing this module registers them. Programs call `kiln::attend`, because exported graphs may not write their inputs.
The lowering for cpu calls the other, with a kernel of its own; see compiler_svc/lower/attend.py.

Their arguments:

- queries: [rows, tokens, heads, head_dim], rotated; float32, bfloat16 or float16.
- keys, values: [rows, tokens, kv_heads, head_dim], of the step's tokens, in the queries' dtype; keys are rotated. Query
  head h reads KV head h // (heads / kv_heads).
- key_cache, value_cache: [blocks, kv_heads, block_tokens, head_dim], of one of these dtypes, float8_e4m3fn or
  int8. In the contiguous layout a block is a slot. No token lies at the last place of the last block. Attention is to
  what the cache keeps of keys and values, those of the step's own tokens included.
- positions: int32 [rows, tokens]: place of each token in its sequence. Negative: there is no token; nothing is written
  for it, and its output is unspecified (zeros here).
- block_table: int32 [rows, blocks of a row]: the row's blocks in the order of positions. They are a ring: a token at
  position p lies in block `block_table[r, p // block_tokens % blocks of a row]` at `p % block_tokens`.
- sinks: float32 [heads]: one more logit in each softmax, which no value belongs to.
- slopes: float32 [heads]: ALiBi; `slope * (key position - query position)` is added to each score.
- tree_mask: bool [tokens, tokens] or [rows, tokens, tokens]: which of the step's tokens each of them attends to. All of
  them attend to the positions before the row's first token, too. None: a token attends to all positions up to its own.
- scale, window, soft_cap: see `execution.attention.reference.Options`. A window of a ring of n positions is at most
  n - tokens + 1.
- reads_cache: False: the rows' sequences begin in this step, so only its own keys matter.
- max_context: static bound of the positions that a row may have.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from execution.attention.reference import Context, Options, Step, attend_to, write_tokens

#: The dtypes of queries.
ATTENTION_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES: Final = (*ATTENTION_DTYPES, torch.float8_e4m3fn, torch.int8)


def attend(
    *tensors: Any, scale: float, window: int = 0, soft_cap: float = 0.0, reads_cache: bool = True, max_context: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what the tokens attended to, and copies of the caches with the step's keys and values."""
    step = Step(*tensors)
    new_keys = write_tokens(step.key_cache, step.keys, step.positions, step.block_table)
    new_values = write_tokens(step.value_cache, step.values, step.positions, step.block_table)
    if reads_cache:
        context = Context.of_cache(new_keys, new_values, step.positions, step.block_table, max_context)
    else:
        context = Context.of_step(step.keys, step.values, step.positions, step.key_cache.dtype)
    return attend_to(context, step, Options(scale=scale, window=window, soft_cap=soft_cap)), new_keys, new_values


def _attend_on_host(*tensors: Any, max_context: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend`, and reads no further than the last token: on the host its position is at hand."""
    length = max(1, int(Step(*tensors).positions.max()) + 1)
    return attend(*tensors, max_context=min(length, max_context), **options)


def _attend_in_place(*tensors: Any, **options: Any) -> Tensor:
    attended, new_keys, new_values = _attend_on_host(*tensors, **options)
    step = Step(*tensors)
    step.key_cache.copy_(new_keys)
    step.value_cache.copy_(new_values)
    return attended


def _fake_attend(*tensors: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    step = Step(*tensors)
    _check(step)
    queries, key_cache, value_cache = (
        like.new_empty(like.shape) for like in (step.queries, step.key_cache, step.value_cache)
    )
    return queries, key_cache, value_cache


def _fake_attend_in_place(*tensors: Any, **_: Any) -> Tensor:
    step = Step(*tensors)
    _check(step)
    return step.queries.new_empty(step.queries.shape)


def _check(step: Step) -> None:
    """Reports wrong arguments when a graph is traced, not when it runs."""
    rows, tokens, heads, head_dim = step.queries.shape
    blocks, kv_heads, block_tokens, _ = step.key_cache.shape
    if heads % kv_heads:
        raise ValueError(f"kiln::attend: {heads} query heads for {kv_heads} KV heads; accepted: a multiple of them")
    new, cache = (rows, tokens, kv_heads, head_dim), (blocks, kv_heads, block_tokens, head_dim)
    mask = (rows, tokens, tokens) if step.tree_mask is None else (rows, tokens, tokens)[-step.tree_mask.dim() :]
    floats, own, cached = ATTENTION_DTYPES, (step.queries.dtype,), (step.key_cache.dtype,)
    for name, shape, dtypes in (
        ("queries", (rows, tokens, heads, head_dim), floats),
        ("keys", new, own),
        ("values", new, own),
        ("key_cache", cache, CACHE_DTYPES),
        ("value_cache", cache, cached),
        ("positions", (rows, tokens), (torch.int32,)),
        ("block_table", (rows, step.block_table.shape[-1]), (torch.int32,)),
        ("sinks", (heads,), (torch.float32,)),
        ("slopes", (heads,), (torch.float32,)),
        ("tree_mask", mask, (torch.bool,)),
    ):
        tensor: Tensor | None = getattr(step, name)
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"kiln::attend: {name} of {tensor.dtype}; accepted: {', '.join(map(str, dtypes))}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"kiln::attend: {name} of shape {list(tensor.shape)}; accepted: {list(shape)}")


_ARGUMENTS: Final = (
    "Tensor queries, Tensor keys, Tensor values, Tensor{keys} key_cache, Tensor{values} value_cache, Tensor positions, "
    "Tensor block_table, Tensor? sinks, Tensor? slopes, Tensor? tree_mask, *, float scale, int window=0, "
    "float soft_cap=0.0, bool reads_cache=True, int max_context"
)
_LIBRARY: Final = torch.library.Library("kiln", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _run, _fake in (
    (f"attend({_ARGUMENTS.format(keys='', values='')}) -> (Tensor, Tensor, Tensor)", attend, _fake_attend),
    (
        f"attend_in_place({_ARGUMENTS.format(keys='(a!)', values='(b!)')}) -> Tensor",
        _attend_in_place,
        _fake_attend_in_place,
    ),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))  # type: ignore[no-untyped-call]
    # For every device: the reference is made of torch's own operators.
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kiln::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.impl("attend", _attend_on_host, "CPU")  # type: ignore[no-untyped-call]
