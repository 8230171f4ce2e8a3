import pytest

from tests.contract.executors.executor_suite import ExecutorSuite
from tests.contract.executors.write_suite import WriteSuite
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy


class TestEagerExecutor(ExecutorSuite, WriteSuite):
    @pytest.fixture
    def toy_bundle(self, toy: MakeToy) -> ToyBundle:
        return toy("logits", 0)
