import pytest

from execution.errors import ExecutableInvalid
from execution.executors.executor import load_executor
from tests.contract.executors.executor_suite import ExecutorSuite, rebind, with_executable
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy


@pytest.mark.toolchain
class TestAotiExecutor(ExecutorSuite):
    @pytest.fixture
    def toy_bundle(self, toy: MakeToy) -> ToyBundle:
        return toy("logits", 1)

    def test_bindings_to_a_weight_of_another_size(self, toy_bundle: ToyBundle) -> None:
        bindings = rebind(toy_bundle.manifest.executables[0], "head.bias", "head.weight")
        with pytest.raises(ExecutableInvalid, match=r"constant head\.bias is bound to float32 of 3072 bytes"):
            load_executor(with_executable(toy_bundle.manifest, constants=bindings), 0, toy_bundle.blob_path)
