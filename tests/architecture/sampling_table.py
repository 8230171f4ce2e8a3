"""Writes docs/sampling.md from the code: `python -m tests.architecture.sampling_table`."""

from __future__ import annotations

from collections.abc import Mapping

from execution.sampling_parameters import MAX_TOKENS, PARAMETERS, Need, Parameter
from tests.repository import ROOT

PAGE = ROOT / "docs" / "sampling.md"
HEAD = """\
# Sampling parameters

Made from the code by `make docs`; a test compares the two. A value that changes nothing is always accepted; another one
needs what the last column says, or is refused by name. Every bundle for cpu takes all of them, and so do bundles for
Neuron that are compiled with `output_logits` or without `on_device_sampling_config`: ranks pick the tokens of requests
with one of logit_bias to forced_token_ids, min_p or typical_p from the logits of their executables. With
`neuron_config.logit_processors` there are twice as many executables, and those of the second half pick these tokens.
Requests that count tokens of the output hold up async scheduling of the steps that they are in.

They come in the order of transformers: logit_bias, repetition_penalty, frequency_penalty with presence_penalty,
no_repeat_ngram_size, bad_words, min_new_tokens, allowed_token_ids, a constraint, forced_token_ids, temperature, top_k,
top_p, min_p, typical_p. All up to forced_token_ids change greedy tokens, too. Where exclusions would leave no token,
only allowed_token_ids and the constraint exclude, or the constraint alone. Log probabilities and logits are reported as
the model gives them, before all of it. transformers' epsilon_cutoff and eta_cutoff have no field. A request that asks
for more tokens by min_new_tokens than by max_new_tokens is refused.

Of what is left, the token is drawn whose log probability plus noise is the largest. Noise is a function of the seed,
the token's position in its sequence, prompt included, and its id: so the draw is the same on the host and on devices,
alone and in a batch, and after a restart. Greedy tokens have none.

On cpu at `-O1` logits have the same bits whatever shares the batch, as long as a step has fewer than 128 live tokens
and half of a head fills vectors of the processor, which have 8 or 16 numbers. Elsewhere a seed may give another token
where two are as good as equal.

| what counts | Kiln and transformers | vLLM |
|---|---|---|
| tokens of `repetition_penalty` | prompt and output; of a prompt that was cut, what is left | prompt and output |
| tokens of `frequency_penalty`, `presence_penalty` | output (transformers has neither) | output |
| `min_p` | after top_k and top_p | before top_k and top_p; the tokens are the same, unless top_p is below 1 |
| tokens that `min_new_tokens` excludes | ends of the model, and `stop_token_ids`, which transformers lacks | both |
| `logit_bias` | as it is, in [-100, 100] | cut to [-100, 100] |

| field | accepts | changes nothing | what it does | needs |
|---|---|---|---|---|
"""
NEEDS = {
    Need.NOTHING: "",
    Need.CHOICE: "a bundle that takes it with each step (`Capabilities.dynamic_sampling`)",
    Need.PROCESSORS: "a bundle that changes logits (`Capabilities.logit_processors`)",
}


def render_row(row: Parameter) -> str:
    """One parameter."""
    accepts, neutral = str(row.domain).replace("inf;", "`Capabilities.max_top_k`;"), row.neutral
    if isinstance(neutral, Mapping):
        accepts, neutral = f"at most {MAX_TOKENS} pairs of token id and {accepts}", "no pair"
    if isinstance(neutral, tuple):
        neutral = "no token"
    cells = (f"`sampling.{row.name}`", accepts, "" if neutral is None else f"{neutral}", row.effect, NEEDS[row.need])
    return f"| {' | '.join(cells)} |\n"


def render_page() -> str:
    """The whole page."""
    return HEAD + "".join(map(render_row, PARAMETERS.values()))


if __name__ == "__main__":
    PAGE.write_text(render_page())
