"""`python -m bench.masks`: how long the masks of constrained output take, with a vocabulary of 131 072 tokens.

The vocabulary is Tekken's, which `pip install mistral-common` brings; another one is `--tokenizer PATH`, a
`tokenizer.json`. The sequences are random walks through the schemas of `tests/constraints`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench.machine import describe_machine
from bench.tables import Row, render_table
from execution.text.constraint import ConstrainedSequence, Constraint
from execution.text.control import Load
from execution.text.handle import TextLimits, make_forkserver
from execution.text.matchers import Matchers
from execution.text.tokenizer import Tokenizer
from runtime_svc.text.constraints import ConstrainedOutput, ConstraintProcesses
from tests.constraints.schemas import CHOSEN, generate

_TEKKEN: Final = "tekken_240911.json"
_EOS: Final = 2
_MAX_TOKENS: Final = 60
_STREAMS: Final = (1, 4, 16)
_HEAD: Final = ("what", "times", "p50", "p99", "most")


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.masks", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json in place of Tekken's")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-masks.md"), help="the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = options.tokenizer or _write_tekken(Path(directory) / "tokenizer.json")
        tokenizer = Tokenizer(path)
        began_s = time.process_time()
        matchers = Matchers(tokenizer, tokenizer.num_ids, (_EOS,))
        loaded_s = time.process_time() - began_s
        cases = enumerate([*CHOSEN, *generate(200, seed=31)])
        walks = [_walk(matchers, Constraint(kind="json_schema", text=case.text), seed) for seed, case in cases]
        steps = asyncio.run(_measure_process(path, tokenizer.num_ids, walks[0]))
    compiles = [walk.compile_s for walk in walks]
    masks = [mask_s for walk in walks for mask_s in walk.masks_s]
    rows: list[Row] = [
        _describe("compile a schema", compiles),
        _describe("take a token and find the next mask", masks),
        *(_describe(f"of {count}, there and back", times) for count, times in steps.items()),
    ]
    size, machine, table = tokenizer.num_ids, describe_machine(), render_table(_HEAD, rows)
    page = f"""# Masks

Written by `python -m bench.masks`, in microseconds: random walks through 250 schemas. A process reads the vocabulary of
{size} tokens in {loaded_s:.1f} s of processor time. Compiles and masks are by processor time. "There and back" is by
the clock what the engine waits for: a call of the process that follows sequences, its answer, and other load.

Machine: {machine}.

{table}
"""
    options.output.write_text(page)
    print(page)


class _Walk:
    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.compile_s = 0.0
        self.tokens: list[int] = []
        self.masks_s: list[float] = []


def _walk(matchers: Matchers, constraint: Constraint, number: int) -> _Walk:
    """Draws allowed tokens until the end."""
    walk, drawn = _Walk(constraint), random.Random(number)
    began_s = time.thread_time()
    matchers.compile(constraint)
    walk.compile_s = time.thread_time() - began_s
    sequence = ConstrainedSequence(number, 0, [], constraint)
    while (found := matchers.follow(sequence)).state == "BUILDING":
        pass
    while len(walk.tokens) < _MAX_TOKENS:
        walk.tokens += found.forced
        bits = np.unpackbits(np.frombuffer(found.mask, np.uint8), bitorder="little")
        token = int(drawn.choice(np.flatnonzero(bits)))
        if token == _EOS:
            walk.tokens = [one for one in walk.tokens if one != _EOS]
            break
        walk.tokens.append(token)
        began_s = time.thread_time()
        found = matchers.follow(ConstrainedSequence(number, len(walk.tokens) - 1, [token]))
        walk.masks_s.append(time.thread_time() - began_s)
        assert found.state == "KNOWN", found
    matchers.forget([number])
    return walk


async def _measure_process(path: Path, vocab_size: int, walk: _Walk) -> dict[int, list[float]]:
    """Follows several sequences with the same tokens in a process; seconds of each step, by their number."""
    forkserver = make_forkserver()
    load = Load(tokenizer=str(path), vocab_size=vocab_size, eos=(_EOS,))
    processes = ConstraintProcesses("bench", load, forkserver, TextLimits())
    measured: dict[int, list[float]] = {}
    try:
        mask = await processes.compile(walk.constraint)
        for count in _STREAMS:
            measured[count] = []
            for _ in range(20):
                outputs: list[ConstrainedOutput] = [processes.begin(walk.constraint, mask) for _ in range(count)]
                for length in range(1, len(walk.tokens) + 1):
                    if outputs[0].forced:
                        for output in outputs:
                            del output.forced[0]
                        continue
                    began_s = time.perf_counter()
                    await processes.follow([(output, walk.tokens[:length]) for output in outputs])
                    measured[count].append(time.perf_counter() - began_s)
                for output in outputs:
                    processes.end(output)
    finally:
        await processes.close()
        forkserver.close()
    return measured


def _describe(what: str, seconds: Sequence[float]) -> Row:
    p50, p99 = (float(np.quantile(seconds, share)) for share in (0.5, 0.99))
    return (what, str(len(seconds)), *(f"{value * 1e6:.0f}" for value in (p50, p99, max(seconds))))


def _write_tekken(path: Path) -> Path:
    """Writes Tekken's vocabulary as byte-level tokens; how it would merge them does not matter here."""
    document = json.loads((files("mistral_common") / "data" / _TEKKEN).read_text())
    num_special = int(document["config"]["default_num_special_tokens"])
    size = int(document["config"]["default_vocab_size"])
    alphabet = _list_alphabet()
    vocab = {f"<special_{number}>": number for number in range(num_special)}
    for token in document["vocab"][: size - num_special]:
        vocab["".join(alphabet[byte] for byte in base64.b64decode(token["token_bytes"]))] = num_special + token["rank"]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<special_{number}>" for number in range(num_special)])
    tokenizer.save(str(path))
    return path


def _list_alphabet() -> list[str]:
    """GPT-2's character of each byte: bytes that print stand for themselves, others follow 255."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte if byte in printed else 256 + others.index(byte)) for byte in range(256)]


if __name__ == "__main__":
    main()
