"""Reading text as documents."""

import math
import time

import pytest

from compiler_svc.config import parse_document, resolve_config
from compiler_svc.config.document import MAX_DEPTH
from compiler_svc.errors import ConfigInvalid


class TestDocument:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "seq_len: 3",
            "[]",
            "null",
            '"neuron_config"',
            '{"neuron_config": {"seq_len": NaN}}',
            '{"neuron_config": {"seq_len": 1, "seq_len": 2}}',
            '{"neuron_config": {"seq_len": ' + "9" * 5000 + "}}",
            "[" * 100_000,
            '{"a":' * 100_000,
        ],
    )
    def test_what_is_no_object_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigInvalid) as caught:
            parse_document(text)
        assert caught.value.violations[0].field == "config_json"

    @pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 900])
    def test_deep_nesting_is_refused(self, depth: int) -> None:
        deep = ('{"a":' * depth + "1" + "}" * depth, '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}")
        for text in deep:
            with pytest.raises(ConfigInvalid, match="at most 64 deep"):
                parse_document(text)

    def test_infinities_are_numbers(self) -> None:
        assert parse_document('{"x": -Infinity}') == {"x": -math.inf}

    def test_the_deepest_document(self) -> None:
        parse_document('{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH)

    def test_a_repeated_name_among_many_is_found_quickly(self) -> None:
        # As many names as a request of the service can hold; the event loop reads them.
        names = "".join(f'"a{number:05}":0,' for number in range(25_000))
        started_s = time.process_time()
        with pytest.raises(ConfigInvalid, match="'z' is given twice"):
            parse_document(f'{{{names}"z":1,"z":2}}')
        assert time.process_time() - started_s < 2

    def test_an_overflowing_number_is_a_mistake_of_its_attribute(self) -> None:
        document = parse_document('{"neuron_config": {"on_device_sampling_config": {"temperature": 1e999}}}')
        with pytest.raises(ConfigInvalid, match="temperature"):
            resolve_config(document, checkpoint_dtype=None)
