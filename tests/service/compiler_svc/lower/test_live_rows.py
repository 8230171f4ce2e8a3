"""Code that leaves out tokens that are not live, and does not let what their memory holds reach others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.graph import CodeGen

from bundle.abi.inputs import UNPICKED_TOP_K
from bundle.abi.outputs import INVALID_ROW
from compiler_svc.builds.executable_stage import find_live_inputs
from compiler_svc.lower.job import LiveInputs, PickedTokens
from compiler_svc.lower.live_rows import find_live_rows
from compiler_svc.models.layers.logits import RankLogits
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_state, describe_submodel
from execution.forkserver.client import ForkserverClient
from execution.sampling import greedy, sample
from tests.checkpoints.tiny_models import GEOMETRIES, write_tiny_model
from tests.ranks.noise import draw_keys
from tests.ranks.stepping import load_shard, run_eagerly
from tests.service.compiler_svc.lower.libraries import lower, open_library, read_code
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

ROWS, TOKENS, WIDTH = 3, 5, 48
VOCAB_SIZE = 200
EQUAL_SIZES = GEOMETRIES["mha-bias-untied"] | {"hidden_size": 16, "intermediate_size": 16}
LIVE = LiveInputs(rows=1, tokens=0, counts=2)


def int32(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def soil(value: float, *shape: int) -> None:
    """Buffers get memory that was freed lately: that of the next ones holds a value."""
    others = [torch.full(shape, value) for _ in range(20)]
    del others


class Elementwise(nn.Module):
    """What Inductor writes loops for: a normalization, halves that change places, and a length of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(2)))

    def forward(self, ids: Tensor, live_rows: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = nn.functional.embedding(ids, self.table)
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
        first, second = normed.chunk(2, dim=-1)
        return torch.cat((-second, first), -1) + 1, ids.amax(1), live_rows + num_tokens


class Sampling(nn.Module):
    """Loops over a vocabulary: what is found in each row, and tokens that are picked by it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(10, WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(VOCAB_SIZE, WIDTH, generator=generator))

    def forward(self, ids: Tensor, live_rows: Tensor, params: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        hidden = nn.functional.embedding(ids, self.table)[:, 0]
        logits = nn.functional.linear(hidden, self.head)
        tokens = (greedy(logits), *(sample(logits, params, keys, count) for count in (8, 0)))
        return logits.amax(-1), logits.exp().sum(-1), live_rows + 0, *tokens


class Picking(Sampling):
    """Tokens, and what is told of the same logits, behind layers with loops over a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(
        self, ids: Tensor, live_rows: Tensor, params: Tensor, keys: Tensor, *state: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, written = nn.functional.embedding(ids, self.table)[:, 0], list[Tensor]()
        for layer, own in zip(self.layers, state, strict=True):
            written.append(own + hidden)
            hidden = hidden + layer(hidden).softmax(-1)
        logits = nn.functional.linear(hidden, self.head)
        return sample(logits, params, keys, 8), logits.exp().sum(-1), live_rows + 0, *written


class Telling(nn.Module):
    """What is told of each token of a prompt, made of logits of tokens that are not live, too."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.table = nn.Parameter(torch.randn(10, WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(VOCAB_SIZE, WIDTH, generator=generator))

    def forward(self, ids: Tensor, live_rows: Tensor, num_tokens: Tensor) -> tuple[Tensor, ...]:
        hidden = nn.functional.embedding(ids, self.table)
        part = nn.functional.linear(hidden, self.head).flatten(0, 1)
        logits = RankLogits(part=part, rank=None, vocab_size=VOCAB_SIZE, ranks=Ranks(1))
        top, top_ids = logits.tell_likeliest(6)
        told = logits.tell(ids.flatten()).view(ids.shape)
        return told, top.view(*ids.shape, 6), top_ids.view(*ids.shape, 6), live_rows + num_tokens


class Heads(nn.Module):
    """Heads before tokens, of which there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4 * 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, ids: Tensor, live_rows: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.embedding(ids, self.table).view(1, 4, 4, 8)
        return (hidden.transpose(1, 2) + 1).contiguous(), live_rows + num_tokens


@pytest.mark.slow
@pytest.mark.toolchain
def test_live_tokens_of_prompts_are_told_of(tmp_path: Path, lowerings: ForkserverClient) -> None:
    model = Telling().requires_grad_(False)
    ids = torch.arange(ROWS * TOKENS, dtype=torch.int32).view(ROWS, TOKENS) % 10
    program = torch.export.export(model, (ids, int32([2]), int32([5, 2, 1])))
    executable = lower(lowerings, tmp_path, program, num_state=0, live=LIVE)
    with open_library(executable, model.state_dict()) as library:
        for live_rows, num_tokens, last in ((2, (5, 2, 1), 7), (3, (5, 5, 5), 15), (1, (2, 5, 5), 2)):
            ids = (ids + 1) % 10
            inputs = [ids, int32([live_rows]), int32(num_tokens)]
            soil(float("nan"), ROWS * TOKENS, VOCAB_SIZE)
            is_computed = (torch.arange(ROWS * TOKENS) < last).view(ROWS, TOKENS)
            for result, expected in list(zip(library.run(inputs), model(*inputs), strict=True))[:3]:
                torch.testing.assert_close(result[is_computed], expected[is_computed], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.toolchain
def test_loops_over_tokens_end_with_the_last_live_one(tmp_path: Path, lowerings: ForkserverClient) -> None:
    model = Elementwise().requires_grad_(False)
    ids = torch.arange(ROWS * TOKENS, dtype=torch.int32).view(ROWS, TOKENS) % 10
    program = torch.export.export(model, (ids, int32([2]), int32([5, 2, 1])))
    executable = lower(lowerings, tmp_path, program, num_state=0, live=LIVE)
    with open_library(executable, model.state_dict()) as library:
        for live_rows, num_tokens, last in (
            (2, (5, 2, 1), 7),
            (3, (1, 1, 5), 15),
            (1, (1, 5, 5), 1),
            (0, (1, 1, 1), 0),
        ):
            # Other tokens each time: the memory of the results before, which may come again, has other values.
            ids = (ids + 1) % 10
            inputs = [ids, int32([live_rows]), int32(num_tokens)]
            expected, longest, _ = model(*inputs)
            soil(float("nan"), *expected.shape)
            result, found, _ = library.run(inputs)
            is_computed = (torch.arange(ROWS * TOKENS) < last).view(ROWS, TOKENS)
            torch.testing.assert_close(result[is_computed], expected[is_computed])
            assert not torch.isclose(result[~is_computed], expected[~is_computed]).any()
            assert found.equal(longest), "what is smaller than a token's values is computed whole"


@pytest.mark.slow
@pytest.mark.toolchain
def test_loops_over_the_vocabulary_leave_out_rows_that_are_not_live(
    tmp_path: Path, lowerings: ForkserverClient
) -> None:
    model, rows = Sampling().requires_grad_(False), 6
    model.table[7] = float("nan")
    ids, keys = torch.arange(rows, dtype=torch.int32)[:, None], draw_keys(rows)
    params = torch.tensor([[1.0, 1.0, 1.0], [0, 1, 1], [5, 0.9, 0.7], [0, 0.8, 1.5], [3, 1, 0], [0, 0.3, 1]])
    program = torch.export.export(model, (ids, int32([2]), params, keys))
    executable = lower(lowerings, tmp_path, program, num_state=0, live=LiveInputs(rows=1, tokens=0))
    with open_library(executable, model.state_dict()) as library:
        for num_live, noise in ((6, 0.0), (2, float("nan")), (4, 1e38), (1, float("-inf")), (0, float("inf"))):
            ids[:, 0] = torch.tensor([1, 7, 2, 3, 4, 5] if num_live == 4 else [1, 2, 3, 4, 5, 6])
            inputs = [ids, int32([num_live]), params, keys]
            largest, total, _, *tokens = model(*inputs)
            soil(noise, rows, VOCAB_SIZE)
            found_largest, found_total, _, *found_tokens = library.run(inputs)
            torch.testing.assert_close(found_largest[:num_live], largest[:num_live], equal_nan=True)
            torch.testing.assert_close(found_total[:num_live], total[:num_live], rtol=1e-4, atol=0, equal_nan=True)
            assert (found_largest[num_live:] == float("-inf")).all(), "the largest of nothing"
            assert (found_total[num_live:] == 0).all(), "the sum of nothing"
            for found, expected in zip(found_tokens, tokens, strict=True):
                assert found[:num_live].equal(expected[:num_live])
                invalid = (found[:num_live] == INVALID_ROW).nonzero().flatten().tolist()
                assert invalid == ([1] if num_live == 4 else []), "NaN is in one row alone"


@pytest.mark.toolchain
def test_loops_that_find_tokens_alone_leave_out_rows_of_which_none_is_picked(
    tmp_path: Path, lowerings: ForkserverClient
) -> None:
    model, rows = Picking().requires_grad_(False), 6
    ids, keys = torch.arange(rows, dtype=torch.int32)[:, None], draw_keys(rows)
    params, state = torch.tensor([[5, 0.9, 0.7]] * rows), [torch.zeros(rows, WIDTH) for _ in model.layers]
    program = torch.export.export(model, (ids, int32([2]), params, keys, *state))
    live = LiveInputs(rows=1, tokens=0, picked=PickedTokens(sampling_params=2, tokens=0))
    executable = lower(lowerings, tmp_path, program, num_state=len(state), live=live)
    assert "kiln_layer_" in read_code(executable)
    with open_library(executable, model.state_dict()) as library:
        for num_live, unpicked in ((6, []), (6, [0, 3]), (4, [1, 5]), (3, [0, 1, 2])):
            ids = (ids + 1) % 10
            tokens, told, *_ = model(ids, int32([num_live]), params, keys, *state)
            asked = params.clone()
            asked[unpicked, 0] = UNPICKED_TOP_K
            soil(float("nan"), rows, VOCAB_SIZE)
            found, found_told, _ = library.run([ids, int32([num_live]), asked, keys, *state])
            torch.testing.assert_close(found_told[:num_live], told[:num_live], rtol=1e-4, atol=0)
            picked = [row for row in range(num_live) if row not in unpicked]
            assert found[picked].equal(tokens[picked])
            others = [row for row in range(rows) if row not in picked]
            assert (found[others] == INVALID_ROW).all(), "the largest of nothing is no number"


@pytest.mark.slow
@pytest.mark.toolchain
def test_as_many_heads_as_tokens_are_not_taken_for_tokens(tmp_path: Path, lowerings: ForkserverClient) -> None:
    model = Heads().requires_grad_(False)
    inputs = [int32([[1, 2, 3, 4]]), int32([1]), int32([2])]
    program = torch.export.export(model, tuple(inputs))
    executable = lower(lowerings, tmp_path, program, num_state=0, live=LIVE)
    with open_library(executable, model.state_dict()) as library:
        soil(float("nan"), 1, 4, 4, 8)
        result, _ = library.run(inputs)
        torch.testing.assert_close(result[:, :, :2], model(*inputs)[0][:, :, :2])


def test_live_tokens_are_counted_by_row() -> None:
    class Prompts(nn.Module):
        def forward(self, ids: Tensor, live_rows: Tensor, num_tokens: Tensor) -> Tensor:
            return ids + live_rows + num_tokens[:, None]

    inputs = torch.ones(ROWS, TOKENS, dtype=torch.int32), int32([2]), int32([4, 3, 1])
    for live, expected in ((LIVE, [4, 3, 0]), (LiveInputs(rows=1, tokens=0), [TOKENS, TOKENS, 0])):
        module = torch.export.export(Prompts(), inputs).module()
        found = find_live_rows(module, live)
        assert found.keys() == {ROWS, ROWS * TOKENS}
        (output,) = module.graph.find_nodes(op="output")
        output.args = ((found[ROWS], found[ROWS * TOKENS]),)
        module.graph.set_codegen(CodeGen())
        values = torch.fx.Interpreter(module).run(*inputs)
        assert [value.tolist() for value in values] == [[2], expected]
        assert values[1].dtype is torch.int32


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("padding_side", "geometry", "counts"),
    [
        ("right", GEOMETRIES["mha-bias-untied"], [5, 16, 1]),
        pytest.param("left", GEOMETRIES["mha-bias-untied"], [5, 16, 1], marks=pytest.mark.slow),
        # As many heads, dimensions of a head, rows and tokens.
        pytest.param("right", EQUAL_SIZES, [2, 4, 1, 3], marks=pytest.mark.slow),
    ],
)
def test_nothing_of_tokens_that_are_not_live_reaches_others(
    tmp_path: Path,
    lowerings: ForkserverClient,
    padding_side: str,
    geometry: dict[str, Any],
    counts: list[int],
) -> None:
    rows, tokens = len(counts), max(counts)
    tiny = write_tiny_model(tmp_path / "model", geometry)
    spec = tiny.spec(
        num_slots=rows + 1,
        ctx_batch_size=rows,
        skips_idle=True,
        padding_side=padding_side,
        sampling=make_sampling(dynamic=True),
    )
    submodel = describe_submodel(spec, "context_encoding", tokens)
    traced = export_submodel(spec, tiny.plan(), submodel)
    executable = lower(
        lowerings, tmp_path, traced.program, num_state=len(submodel.state), live=find_live_inputs(submodel)
    )
    shard = load_shard(tiny.plan(), tiny.checkpoint)
    # A token that is nowhere live has no numbers.
    (table,) = (name for name in shard if "embed_tokens" in name)
    shard[table][7] = float("nan")
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(8, 90, (rows, tokens), dtype=torch.int32, generator=generator)
    slots = int32([2, 0, 3, 1][:rows])
    is_live = torch.arange(tokens) < int32(counts)[:, None]
    if padding_side == "left":
        is_live = is_live.flip(1)
    positions = (is_live.cumsum(1) - 1).clamp(min=0).int()

    params = torch.tensor([[5.0, 0.9, 1.0]] * rows)

    def make_arguments(dead_token: int, num_live: int) -> list[Tensor]:
        known = {
            "input_ids": torch.where(is_live & (torch.arange(rows) < num_live)[:, None], ids, dead_token).int(),
            "position_ids": positions,
            "seq_ids": slots,
            "num_tokens": int32(counts),
            "computed_context_lens": int32([0] * rows),
            "live_rows": int32([num_live]),
            "sampling_params": params,
            "noise_keys": draw_keys(rows),
        }
        state = [torch.zeros(tensor.shape) for tensor in describe_state(spec).tensors]
        return [*(known[one.name] for one in submodel.inputs), *state]

    def run(dead_token: int, num_live: int) -> tuple[list[Tensor], list[Tensor]]:
        arguments = make_arguments(dead_token, num_live)
        return library.run(arguments), arguments[len(submodel.inputs) :]

    with open_library(executable, {one.name: shard[one.tensor] for one in traced.constants}) as library:
        expected, expected_state = run(dead_token=9, num_live=rows)
        unlimited = run_eagerly(spec, tiny.plan(), submodel, shard)(*make_arguments(dead_token=9, num_live=rows))
        for one, other in zip(expected, unlimited, strict=False):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        for num_live in (rows, 2, 1):
            outputs, state = run(dead_token=7, num_live=num_live)
            for one, other in zip(outputs, expected, strict=True):
                assert one[:num_live].equal(other[:num_live]), "the same bits, whatever the other rows hold"
            for one, other in zip(state, expected_state, strict=True):
                written = slots[:num_live].long()
                assert one[written].equal(other[written])
                assert one.isfinite().all()

        params[0, 0] = UNPICKED_TOP_K
        outputs, _ = run(dead_token=9, num_live=rows)
        for one, other, described in zip(outputs, expected, submodel.outputs, strict=True):
            if described.name == "tokens":
                assert one[1:].equal(other[1:])
                assert one.flatten()[0] == INVALID_ROW, "no token was looked for"
            else:
                assert one.equal(other)
        params[0, 0] = 5

        # Of a row that has no numbers itself, which code that picks tokens must not take for indices.
        ids[1, is_live[1]] = 7
        outputs, _ = run(dead_token=9, num_live=rows)
        others = [0, *range(2, rows)]
        for one, other in zip(outputs, expected, strict=True):
            assert one[others].equal(other[others])
        (tokens,) = (one for one, spec in zip(outputs, submodel.outputs, strict=True) if spec.name == "tokens")
        assert tokens.flatten()[1] == INVALID_ROW
