"""The parameters by which a request shapes how its tokens are picked: each field of `SamplingParams` is a row.

Wire, admission, engine, ranks and the table of docs/sampling.md loop over the rows. A new parameter is a field here and
one of generation.proto, and what `processors` does by it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final


class Need(enum.Enum):
    """What a deployment needs for values other than its own or the neutral one; `value` is how errors refuse them."""

    NOTHING = ""
    CHOICE = "sampling is compiled into the bundle"
    PROCESSORS = (
        "executables pick the tokens, and neither change logits nor return any; compile the bundle with "
        "neuron_config.logit_processors or neuron_config.output_logits"
    )


@dataclass(frozen=True, slots=True)
class Domain:
    """The finite numbers from `smallest` to `largest`; `words` say it where the two bounds do not say all."""

    smallest: float
    largest: float = math.inf
    excludes_smallest: bool = False
    words: str = ""

    def __contains__(self, value: float) -> bool:
        is_above = value > self.smallest if self.excludes_smallest else value >= self.smallest
        return is_above and value <= self.largest and math.isfinite(value)

    def __str__(self) -> str:
        if self.words:
            return self.words.format(largest=self.largest)
        if self.excludes_smallest:
            end = "" if math.isinf(self.largest) else f", at most {self.largest:g}"
            return f"a number above {self.smallest:g}{end}"
        if math.isinf(self.largest):
            return f"a number of at least {self.smallest:g}"
        return f"a number from {self.smallest:g} to {self.largest:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A row.

    Attributes:
        name: Of the field in the messages of every API.
        neutral: The value that changes nothing; None if each value changes something.
        domain: The accepted numbers; for pairs of token id and number, those of the numbers.
        effect: What it does, for the pages.
    """

    name: str = ""
    neutral: object
    domain: Domain
    need: Need
    effect: str


_TOP_K: Final = Domain(-1, words="1 to {largest}; 0 or -1 for no limit")
_SHARE: Final = Domain(0, 1, excludes_smallest=True)
_SEED: Final = Domain(0, (1 << 64) - 1, words="an unsigned integer of 64 bits")
_PENALTY: Final = Domain(-2, 2)
_COUNT: Final = Domain(0)
#: Most tokens that one parameter names.
MAX_TOKENS: Final = 1024
_TOKENS: Final = Domain(0, words=f"at most {MAX_TOKENS} tokens of the vocabulary")


def _row(default: Any, domain: Domain, need: Need, effect: str, *, is_neutral: bool = True) -> Any:
    neutral = default if is_neutral else None
    row = Parameter(neutral=neutral, domain=domain, need=need, effect=effect)
    if isinstance(default, Mapping):
        return field(default_factory=dict, metadata={"row": row})
    return field(default=default, metadata={"row": row})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a sequence are picked, every default filled in; the rows say what the fields are."""

    temperature: float = _row(1.0, Domain(0), Need.CHOICE, "divides the logits; 0 is greedy")
    top_k: int = _row(0, _TOP_K, Need.CHOICE, "keeps the k most likely tokens")
    top_p: float = _row(1.0, _SHARE, Need.CHOICE, "keeps the smallest set whose probability reaches p")
    seed: int = _row(0, _SEED, Need.NOTHING, "decides, with position and token id, what is drawn", is_neutral=False)
    min_p: float = _row(0.0, Domain(0, 1), Need.PROCESSORS, "drops what is less likely than p of the likeliest")
    frequency_penalty: float = _row(
        0.0, _PENALTY, Need.PROCESSORS, "taken off for each time that a token was generated"
    )
    presence_penalty: float = _row(0.0, _PENALTY, Need.PROCESSORS, "taken off once a token was generated")
    repetition_penalty: float = _row(
        1.0,
        Domain(0, excludes_smallest=True),
        Need.PROCESSORS,
        "divides positive and multiplies negative logits of tokens of prompt and output",
    )
    logit_bias: Mapping[int, float] = _row({}, Domain(-100, 100), Need.PROCESSORS, "added, by token id")
    typical_p: float = _row(1.0, _SHARE, Need.PROCESSORS, "keeps the most typical set whose probability reaches p")
    no_repeat_ngram_size: int = _row(
        0, _COUNT, Need.PROCESSORS, "excludes what would repeat so many tokens in a row of prompt and output"
    )
    bad_words: tuple[tuple[int, ...], ...] = _row(
        (), _TOKENS, Need.PROCESSORS, "excludes the last token of each sequence behind its others"
    )
    min_new_tokens: int = _row(
        0, _COUNT, Need.PROCESSORS, "excludes the tokens that would end the sequence until it has so many"
    )
    allowed_token_ids: tuple[int, ...] = _row((), _TOKENS, Need.PROCESSORS, "excludes all other tokens")
    forced_token_ids: tuple[int, ...] = _row((), _TOKENS, Need.PROCESSORS, "are the first tokens of the output")

    @property
    def is_processed(self) -> bool:
        """Whether there is more to do than every executable can: a value that needs processors is not neutral."""
        return _read_processed(self) != _NEUTRAL

    @property
    def counts_tokens(self) -> bool:
        """Whether what processors do depends on which tokens were generated, not only on how many."""
        return (
            self.repetition_penalty != 1
            or bool(self.frequency_penalty or self.presence_penalty or self.no_repeat_ngram_size)
            or any(len(word) > 1 for word in self.bad_words)
        )

    @property
    def is_greedy(self) -> bool:
        """Whether these values always pick the most likely token."""
        return self.temperature == 0 or self.top_k == 1

    def picks_like(self, other: SamplingParams) -> bool:
        """Tells whether executables pick tokens alike by both. Clients send float32, so values need not be equal."""
        if self.is_greedy or other.is_greedy:
            return self.is_greedy and other.is_greedy
        return all(is_close(getattr(self, name), getattr(other, name)) for name in CHOSEN)


#: Every row, by its name.
PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType(
    {one.name: replace(one.metadata["row"], name=one.name) for one in fields(SamplingParams)}
)
#: Names of those that executables either take with each step, or have compiled in.
CHOSEN: Final = tuple(name for name, row in PARAMETERS.items() if row.need is Need.CHOICE)
_PROCESSED: Final = tuple(name for name, row in PARAMETERS.items() if row.need is Need.PROCESSORS)
_NEUTRAL: Final = tuple(PARAMETERS[name].neutral for name in _PROCESSED)
_read_processed: Final = attrgetter(*_PROCESSED)


def is_close(value: float, other: float) -> bool:
    """Tells whether two numbers may be the same one, of which one was a float32."""
    return math.isclose(value, other, rel_tol=1e-6)
