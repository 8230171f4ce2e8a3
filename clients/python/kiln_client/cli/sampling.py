"""Options of the commands that generate text: how long it may be, and how tokens are chosen."""

from __future__ import annotations

import click

from kiln_client.cli.parameters import INT32, UINT64

#: Named as the parameters of `AsyncRuntime.generate`; None leaves the choice to the runtime.
SAMPLING = (
    click.option(
        "--max-new-tokens", type=INT32, help="Tokens to generate at most. Default: all that the sequence length allows."
    ),
    click.option("--temperature", type=float, help="Divide the logits by this number; 0 is greedy."),
    click.option(
        "--top-k", type=INT32, help="Keep the K most likely tokens; 0 or -1 keeps all that the bundle considers."
    ),
    click.option("--top-p", type=float, help="Keep the smallest set of tokens whose probability reaches P."),
    click.option("--seed", type=UINT64, help="Equal seeds give equal tokens. Default: random."),
)
