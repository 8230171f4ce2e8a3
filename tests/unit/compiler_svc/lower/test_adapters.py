import torch

from compiler_svc.lower.aoti import InPlaceProgram
from tests.ranks.toy import NUM_STATE, STATE_SHAPE, describe, export, make_model


def arguments() -> list[torch.Tensor]:
    inputs = (torch.tensor([[3], [4]]), torch.tensor([[0], [5]]), torch.tensor([0, 1]))
    return [*(tensor.to(torch.int32) for tensor in inputs), *(torch.zeros(STATE_SHAPE) for _ in range(NUM_STATE))]


def test_state_is_written_where_it_lies() -> None:
    functional = export(describe("token_generation", "logits"), "logits")
    given = arguments()
    (logits,) = InPlaceProgram(functional, NUM_STATE)(*given)
    expected, *state = make_model(0)(*arguments())
    torch.testing.assert_close(logits, expected)
    for written, new in zip(given[-NUM_STATE:], state, strict=True):
        torch.testing.assert_close(written, new)
    assert all(tensor.any() for tensor in given[-NUM_STATE:])


def test_constants_keep_their_names() -> None:
    functional = export(describe("token_generation", "logits"), "logits")
    program = torch.export.export(InPlaceProgram(functional, NUM_STATE), tuple(arguments()))
    assert set(program.state_dict) == set(make_model(0).state_dict())
    assert len(program.graph_signature.user_outputs) == 1
