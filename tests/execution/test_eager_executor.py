import pytest

from tests.contract.executor_suite import ExecutorSuite
from tests.execution.conftest import MakeToy
from tests.execution.toy import ToyBundle


class TestEagerExecutor(ExecutorSuite):
    @pytest.fixture
    def toy_bundle(self, toy: MakeToy) -> ToyBundle:
        return toy("logits", 0)
