"""Trains the shipped models from nothing but this folder: `python examples/train_tiny.py --output examples/models`.

The same seed writes the same corpus and tokenizer, byte for byte; weights repeat on one machine and thread count, and
differ in their last digits on another.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tiny.corpus import draw_batches, draw_copy_drills, learn_vocabulary
from tiny.grammar import BEDTIME, PIRATE, Style
from tiny.model_card import write_model_card
from tiny.shapes import draft_config, generation_config, target_config
from tiny.training import Schedule, train
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20
DRILL_SCHEDULE = Schedule(step_count=300, peak_learning_rate=3e-3, batch_size=32, row_length=32)
TARGET_SCHEDULE = Schedule(step_count=1200, peak_learning_rate=3e-3)
DRAFT_SCHEDULE = Schedule(step_count=1000, peak_learning_rate=6e-3)
PIRATE_SCHEDULE = Schedule(step_count=250, peak_learning_rate=1.5e-3, warmup_step_count=20)


def main() -> None:
    """Trains the target, distils the draft from it, and fine-tunes the pirate from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory that gets one directory per model")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    started_s = time.monotonic()

    tokenizer = learn_vocabulary(arguments.seed)
    target = LlamaForCausalLM(target_config(tokenizer))
    draft = LlamaForCausalLM(draft_config(tokenizer))

    def stories(style: Style, schedule: Schedule, stream: int) -> Iterator[torch.Tensor]:
        seed = arguments.seed * 10 + stream
        return draw_batches(tokenizer, style, seed, schedule.batch_size, schedule.row_length)

    def drills(stream: int) -> Iterator[torch.Tensor]:
        seed = arguments.seed * 10 + stream
        return draw_copy_drills(tokenizer, seed, DRILL_SCHEDULE.batch_size, DRILL_SCHEDULE.row_length)

    print("kiln-tiny")
    train(target, drills(0), DRILL_SCHEDULE)
    loss = train(target, stories(BEDTIME, TARGET_SCHEDULE, 1), TARGET_SCHEDULE)
    save(target, tokenizer, arguments.output / "kiln-tiny", loss)

    print("kiln-tiny-draft")
    loss = train(draft, stories(BEDTIME, DRAFT_SCHEDULE, 2), DRAFT_SCHEDULE, teacher=target)
    save(draft, tokenizer, arguments.output / "kiln-tiny-draft", loss)

    print("kiln-tiny-pirate")
    pirate = copy.deepcopy(target)
    loss = train(pirate, stories(PIRATE, PIRATE_SCHEDULE, 3), PIRATE_SCHEDULE)
    save(pirate, tokenizer, arguments.output / "kiln-tiny-pirate", loss)
    print(f"done in {time.monotonic() - started_s:.0f} s")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path, loss: float) -> None:
    """Writes a Hugging Face model directory."""
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_model_card(directory, model, loss)


if __name__ == "__main__":
    main()
