import msgspec
import pytest
import torch

from bundle.abi.outputs import INVALID_ROW
from compiler_svc.golden.comparison import GoldenComparison
from compiler_svc.golden.errors import GoldenMismatch
from tests.checkpoints.specs import HOST_SAMPLING

GREEDY = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", temperature=0.0)
REFERENCE = torch.tensor([1.0, 4.0, 3.9, -2.0])


def compare(token: int, logits: torch.Tensor | None = None, tolerance: float = 1e-4) -> GoldenComparison:
    outputs = {"tokens": torch.tensor(token, dtype=torch.int32)} | ({} if logits is None else {"logits": logits})
    return GoldenComparison("tag").with_step(outputs, REFERENCE, position=3, tolerance=tolerance, sampling=GREEDY)


def test_the_references_token() -> None:
    assert compare(1, REFERENCE) == GoldenComparison("tag", 1, 0.0, 0)


def test_a_tie_may_go_either_way() -> None:
    assert compare(2, tolerance=0.1).num_ties == 1
    with pytest.raises(GoldenMismatch, match=r"token 2 in place of 1, whose logit is 2\.50e-02 of the largest away"):
        compare(2, tolerance=0.01)


def test_a_token_that_is_none() -> None:
    with pytest.raises(GoldenMismatch, match="token 4 in place of 1, whose logit is inf "):
        compare(4, tolerance=1.0)


def test_a_row_without_numbers_is_no_agreement() -> None:
    """Of a checkpoint with NaN the reference has no numbers either."""
    comparison, outputs = GoldenComparison("tag"), {"tokens": torch.tensor(INVALID_ROW, dtype=torch.int32)}
    with pytest.raises(GoldenMismatch, match="logits are NaN or infinite"):
        comparison.with_step(outputs, REFERENCE * float("nan"), position=3, tolerance=1e-4, sampling=GREEDY)


def test_the_token_must_follow_from_the_executables_own_logits() -> None:
    """Even if it would follow from the reference's logits."""
    with pytest.raises(GoldenMismatch, match="token 2 in place of 1"):
        compare(2, REFERENCE + 0.01, tolerance=0.1)
    assert compare(2, torch.tensor([1.0, 3.9, 4.0, -2.0]), tolerance=0.1).num_ties == 1


def test_where_all_logits_are_0_deviations_count_as_they_are() -> None:
    """As of a head that was never trained."""
    zeros = torch.zeros(4)

    def compare_zeros(token: int, logits: torch.Tensor) -> GoldenComparison:
        outputs = {"tokens": torch.tensor(token, dtype=torch.int32), "logits": logits}
        return GoldenComparison("tag").with_step(outputs, zeros, position=3, tolerance=1e-4, sampling=GREEDY)

    assert compare_zeros(0, zeros) == GoldenComparison("tag", 1, 0.0, 0)
    assert compare_zeros(2, torch.tensor([0.0, 0.0, 1e-5, 0.0])).num_ties == 1
    with pytest.raises(GoldenMismatch, match=r"logits deviate by 1\.00e-03"):
        compare_zeros(2, torch.tensor([0.0, 0.0, 1e-3, 0.0]))
    with pytest.raises(GoldenMismatch, match="token 4 in place of 0"):
        compare_zeros(4, zeros)
