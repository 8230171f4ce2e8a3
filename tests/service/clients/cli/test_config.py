"""`kiln config reference`."""

from __future__ import annotations

from tests.service.clients.conftest import Kiln


def test_reference(kiln: Kiln) -> None:
    out = kiln("config", "reference", "max_context_length", "--target", "trn2").out
    assert out.startswith("NeuronConfig.max_context_length\n  takes: an integer from 1")
    assert "  rule: at most seq_len" in out
    assert "  trn2: planned" in out
    assert "cpu" not in out
    (row,) = kiln("config", "reference", "logical_neuron_cores", "--json").last["attributes"]
    assert row["targets"].keys() == {"cpu", "inf2, trn1", "trn2, trn3"}
    assert len(kiln("config", "reference", "--json").last["attributes"]) > 300


def test_reference_of_a_name_that_there_is_not(kiln: Kiln) -> None:
    outcome = kiln("config", "reference", "seqlen")
    assert outcome.exit_code == 2
    assert "did you mean seq_len" in outcome.err
