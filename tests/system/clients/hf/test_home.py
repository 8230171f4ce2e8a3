"""A checkpoint becomes a model by itself: the services of a home are started, compile it and load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kiln_client.errors import ModelNotFound
from kiln_client.hf.neuron import KilnForSampling

from tests.system.clients.conftest import make_home
from tests.system.clients.hf.conftest import MODEL


@pytest.mark.slow
def test_a_checkpoint_is_compiled_and_loaded(tmp_path: Path, tokenizer: Any, reference: Any) -> None:
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    with make_home(tmp_path / "home") as home:
        with pytest.raises(ModelNotFound):
            KilnForSampling.from_pretrained("no-such-model", home=home)
        sizes = {"n_positions": 128, "context_length_estimate": 64, "batch_size": 3, "prompt_batch_size": 1}
        model = KilnForSampling.from_pretrained(MODEL, home=home, optimization_level=0, amp="f32", **sizes)
        model.to_neuron()
        greedy = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.3}
        assert model.generate(**prompt, **greedy).tolist() == reference.generate(**prompt, **greedy).tolist()
        assert model.sample(prompt.input_ids, sequence_length=20).shape[0] == 3
        assert (model.neuron_config.max_length, model.neuron_config.batch_size) == (128, 3)
        # The services have it now.
        again = KilnForSampling.from_pretrained(MODEL, home=home, optimization_level=0, amp="f32", **sizes)
        assert again.deployment.id == model.deployment.id
