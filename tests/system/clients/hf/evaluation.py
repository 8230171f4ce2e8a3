"""Evaluates a deployment and its checkpoint with lm-evaluation-harness: prints the figures and answers of both.

Run by a Python that has lm_eval: `evaluation.py CHECKPOINT DEPLOYMENT ADDRESS TOKEN_FILE FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from kiln_client.hf import KilnForCausalLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [
    {
        "text": f"Once upon a time, a little {animal}",
        "good": " named Rosie lived in a deep",
        "bad": " of which the house",
    }
    for animal in ("fox", "frog", "deer", "otter", "badger")
]
#: JSON is YAML, too.
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": 0,
        "doc_to_choice": "{{[good, bad]}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tale": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{good}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}{{good}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
}


def main(checkpoint: str, deployment: str, address: str, token: str, folder: str) -> None:
    """Writes the tasks, runs them with both models, and prints one JSON object for each."""
    rows = Path(folder) / "rows.json"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (Path(folder) / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
    tasks = TaskManager(include_path=folder, include_defaults=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    served = KilnForCausalLM.from_pretrained(checkpoint, deployment_id=deployment, address=address, token=Path(token))
    for model in (served, AutoModelForCausalLM.from_pretrained(checkpoint)):
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=100)
        found = lm_eval.simple_evaluate(
            model=harness, tasks=[*TASKS], task_manager=tasks, bootstrap_iters=0, log_samples=True
        )
        figures = {
            f"{task}.{name}": float(value)
            for task, row in found["results"].items()
            for name, value in row.items()
            if name.endswith(",none") and "stderr" not in name
        }
        answers = {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}
        sys.stdout.write(json.dumps({"figures": figures, "answers": answers}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
