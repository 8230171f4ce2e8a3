"""Trains the shipped models from this folder alone: `python examples/train_tiny.py --output examples/models`.

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
from tiny.corpus import (
    SEED,
    Draw,
    content_emphasis,
    draw_batches,
    draw_call,
    draw_document,
    draw_request,
    draw_with_tools,
    learn_vocabulary,
)
from tiny.grammar import BEDTIME, PIRATE, Style
from tiny.model_card import write_model_card
from tiny.shapes import draft_config, generation_config, target_config
from tiny.tokenizer import ASSISTANT, END_OF_TURN, TOOL_CHAT_TEMPLATE_PATH
from tiny.training import Schedule, train
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

REQUEST_SCHEDULE = Schedule(step_count=600, peak_learning_rate=3e-3, batch_size=32, row_length=48)
TARGET_SCHEDULES = (  # two cosine cycles
    Schedule(step_count=1000, peak_learning_rate=2.5e-3),
    Schedule(step_count=700, peak_learning_rate=2e-3),
)
DRAFT_SCHEDULE = Schedule(step_count=800, peak_learning_rate=5e-3)
PIRATE_SCHEDULE = Schedule(step_count=250, peak_learning_rate=1.5e-3, warmup_step_count=20)
# Short chats first: from long ones it learns how calls are written long before it learns to copy what they name.
CALL_SCHEDULE = Schedule(step_count=400, peak_learning_rate=2.5e-3, batch_size=20, row_length=128)
TOOLS_SCHEDULE = Schedule(step_count=450, peak_learning_rate=2e-3, batch_size=10, row_length=256)


def main() -> None:
    """Trains the target, fine-tunes two siblings from it, and distils the draft from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory that gets one directory per model")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    started_s = time.monotonic()

    tokenizer = learn_vocabulary(arguments.seed)
    target = LlamaForCausalLM(target_config(tokenizer))
    draft = LlamaForCausalLM(draft_config(tokenizer))

    emphasis = content_emphasis(tokenizer, factor=4.0)

    def batches(draw: Draw, style: Style, schedule: Schedule, stream: int) -> Iterator[torch.Tensor]:
        return draw_batches(
            tokenizer,
            draw,
            style,
            seed=arguments.seed * 10 + stream,
            batch_size=schedule.batch_size,
            row_length=schedule.row_length,
        )

    # From whole stories alone it learns late, or never, to look up what the user asked for and whom it wrote about.
    print("kiln-tiny: requests, and how their stories begin")
    train(target, batches(draw_request, BEDTIME, REQUEST_SCHEDULE, 0), REQUEST_SCHEDULE, emphasis)
    print("kiln-tiny: whole texts")
    for cycle, schedule in enumerate(TARGET_SCHEDULES):
        loss = train(target, batches(draw_document, BEDTIME, schedule, 1 + cycle), schedule, emphasis)
    save(target, tokenizer, arguments.output / "kiln-tiny", loss)

    print("kiln-tiny-pirate")
    pirate = copy.deepcopy(target)
    loss = train(pirate, batches(draw_document, PIRATE, PIRATE_SCHEDULE, 3), PIRATE_SCHEDULE, emphasis)
    save(pirate, tokenizer, arguments.output / "kiln-tiny-pirate", loss)

    print("kiln-tiny-draft")
    loss = train(draft, batches(draw_document, BEDTIME, DRAFT_SCHEDULE, 4), DRAFT_SCHEDULE, emphasis, teacher=target)
    save(draft, tokenizer, arguments.output / "kiln-tiny-draft", loss)
    print("kiln-tiny-tools")
    caller = copy.deepcopy(target)
    tokenizer.chat_template = TOOL_CHAT_TEMPLATE_PATH.read_text()
    begin, end = tokenizer.convert_tokens_to_ids([ASSISTANT, END_OF_TURN])
    stages = [(draw_call, CALL_SCHEDULE, 100 + cycle) for cycle in range(5)]
    stages += [(draw_with_tools, TOOLS_SCHEDULE, 110 + cycle) for cycle in range(2)]
    for draw, schedule, stream in stages:
        weights = torch.ones(len(tokenizer))
        loss = train(caller, batches(draw, BEDTIME, schedule, stream), schedule, weights, turn=(begin, end))
    save(caller, tokenizer, arguments.output / "kiln-tiny-tools", loss)
    print(f"done in {time.monotonic() - started_s:.0f} s")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path, loss: float) -> None:
    """Writes a Hugging Face model directory."""
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_model_card(directory, model, loss)


if __name__ == "__main__":
    main()
