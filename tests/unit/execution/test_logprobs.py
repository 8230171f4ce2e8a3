import torch

from execution.sampling import pick_logprobs


def test_logprobs_are_those_of_the_whole_distribution() -> None:
    logits = torch.randn(4, 31) * 5
    tokens = torch.tensor([3, 0, 30, 7], dtype=torch.int32)
    picked, top_ids, top = pick_logprobs(logits, tokens, 5)
    expected = torch.log(torch.softmax(logits.double(), -1))
    torch.testing.assert_close(picked.double(), expected[range(4), tokens.long()], rtol=0, atol=1e-5)
    assert torch.equal(top_ids, logits.argsort(descending=True, dim=-1)[:, :5])
    torch.testing.assert_close(top.double(), expected.gather(1, top_ids), rtol=0, atol=1e-5)


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(2, 1000).bfloat16()
    picked, _, _ = pick_logprobs(logits, torch.tensor([1, 2], dtype=torch.int32), 0)
    assert picked.dtype == torch.float32
    torch.testing.assert_close(picked, logits.float().log_softmax(-1)[range(2), [1, 2]])
