"""Prompts, and what each weight set answers to them: computed once, before there are faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kiln.runtime.v1 import generation_pb2 as pb

#: Tokens of a reference; every shorter greedy answer is its beginning.
MAX_ANSWER: Final = 120

OPENINGS: Final = (
    "Once upon a time",
    "The old house at the end of the street was dark, and the door",
    "When the rain stopped, the fox",
    "There was a little girl who",
    "Far out at sea",
    "The king said to his three sons",
    "Every morning the bird",
    "In a small town",
)
SUBJECTS: Final = ("a cat", "the moon", "a ship", "winter")
#: By name, requests that hold a prompt and nothing else. Each way to give a prompt is there, and so many prompts that
#: most are never under way when ranks are lost twice: such a prompt may be refused later.
PROMPTS: Final[Mapping[str, pb.GenerateRequest]] = {
    **{f"ids {n}": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*range(3 + n, 6 + 8 * n)])) for n in range(12)},
    **{f"text {n}": pb.GenerateRequest(text=text) for n, text in enumerate(OPENINGS)},
    **{
        f"chat {n}": pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=f"Tell me a story about {subject}.")])
        )
        for n, subject in enumerate(SUBJECTS)
    },
}
#: A prompt that is kept for the end of a run.
LAST_PROMPT: Final = "text 0"


def greedy_request(deployment_id: str, prompt: str, count: int) -> pb.GenerateRequest:
    """A request for exactly `count` greedy tokens."""
    request = pb.GenerateRequest()
    request.CopyFrom(PROMPTS[prompt])
    request.deployment_id = deployment_id
    request.sampling.temperature = 0
    request.stop.max_new_tokens = count
    request.stop.ignore_eos = True
    return request


class References:
    """Answers by the digest of the weights and the prompt, and which weights each epoch of a deployment has."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], list[int]] = {}
        self._digests: dict[tuple[str, int], str] = {}

    def add(self, digest: str, prompt: str, tokens: list[int]) -> None:
        """Takes an answer that was given without company and without faults."""
        assert len(tokens) == MAX_ANSWER, f"{len(tokens)} tokens"
        self._answers[digest, prompt] = tokens

    def note_epoch(self, deployment_id: str, epoch: int, digest: str) -> None:
        """Remembers what the runtime says of an epoch."""
        self._digests[deployment_id, epoch] = digest

    def knows(self, deployment_id: str, tokens: Sequence[tuple[int, int]]) -> bool:
        """Whether it is known which weights gave an answer: a client may have it before the operator's call ends."""
        return not tokens or (deployment_id, tokens[0][0]) in self._digests

    def find_mistake(self, deployment_id: str, prompt: str, tokens: Sequence[tuple[int, int]]) -> str | None:
        """Compares a greedy answer, whole or not, with the reference of the weights that gave it.

        A swap that lets requests run on (CONTINUE) mixes two weight sets in one answer; what follows it has no
        reference, and is not compared.

        Args:
            tokens: Epoch and id of each token, in order.

        Returns:
            What differs; None if nothing does.
        """
        if not tokens:
            return None
        epoch = tokens[0][0]
        given = [token for of, token in tokens if of == epoch]
        if [of for of, _ in tokens] != sorted(of for of, _ in tokens):
            return "its epochs go back"
        digest = self._digests.get((deployment_id, epoch))
        if digest is None:
            return f"the runtime never named the weights of its epoch {epoch}"
        expected = self._answers[digest, prompt][: len(given)]
        if given == expected:
            return None
        place = next(index for index, pair in enumerate(zip(given, expected, strict=True)) if pair[0] != pair[1])
        return f"token {place} of epoch {epoch} is {given[place]}, and the reference has {expected[place]}"
