from pathlib import Path

import pytest
import torch

from bundle.abi.outputs import INVALID_ROW
from execution.errors import ExecutableInvalid
from execution.executors.executor import load_executor
from tests.contract.executors.executor_suite import TKG, ExecutorSuite, rebind, token_inputs, with_executable
from tests.contract.executors.write_suite import WriteSuite
from tests.ranks.noise import draw_keys
from tests.ranks.toy import ToyBundle, make_model, save_shard
from tests.ranks.toy_bundles import MakeToy


@pytest.mark.toolchain
class TestAotiExecutor(ExecutorSuite, WriteSuite):
    @pytest.fixture
    def toy_bundle(self, toy: MakeToy) -> ToyBundle:
        return toy("logits", 1)

    def test_bindings_to_a_weight_of_another_size(self, toy_bundle: ToyBundle) -> None:
        bindings = rebind(toy_bundle.manifest.executables[0], "head.bias", "head.weight")
        with pytest.raises(ExecutableInvalid, match=r"constant head\.bias is bound to float32 of 3072 bytes"):
            load_executor(with_executable(toy_bundle.manifest, constants=bindings), 0, toy_bundle.blob_path)

    @pytest.mark.slow
    def test_row_without_numbers_is_marked_and_fails_no_other(self, toy: MakeToy, tmp_path: Path) -> None:
        """One embedding is NaN, and compiled code checks the indices that it gathers with."""
        bundle, poison = toy("tokens", 1), 9
        model = make_model(0)
        model.embedding.weight[poison] = float("nan")
        executor = load_executor(bundle.manifest, 0, bundle.blob_path)
        inputs = token_inputs([7, poison], [0, 0], [0, 1])
        inputs |= {"sampling_params": torch.tensor([[5.0, 0.9, 1.0]] * 2), "noise_keys": draw_keys(2)}
        numbers = executor.run(TKG, inputs)["tokens"]
        executor.stage_weights(save_shard(model, 0, 1, tmp_path / "poisoned.safetensors"))
        executor.swap_weights()
        assert executor.run(TKG, inputs)["tokens"].tolist() == [numbers[0], INVALID_ROW]
        executor.close()
