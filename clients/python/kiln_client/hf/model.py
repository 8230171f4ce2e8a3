"""A deployment in the place of a model of transformers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch
from kiln.runtime.v1.generation_pb2 import Token
from kiln.runtime.v1.runtime_pb2 import Deployment
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutput

from kiln_client.blocking import loop_thread
from kiln_client.errors import FeatureNotServed
from kiln_client.hf.checkpoints import prepare_deployment
from kiln_client.hf.parameters import UNSERVED, OwnOptions, choose_options, find_unserved, read_defaults
from kiln_client.hf.rows import TokenRows
from kiln_client.options import check_options
from kiln_client.runtime import AsyncRuntime

_logger = logging.getLogger(__name__)

#: Arguments of `generate` that no generation config has.
_ARGUMENTS: Final = ("input_ids", "attention_mask", "tokenizer", "stopping_criteria")


class KilnConfig(PreTrainedConfig):  # type: ignore[misc]
    """What transformers is to know of a deployment whose checkpoint is not here."""

    model_type = "kiln"


class KilnForCausalLM(GenerationMixin):  # type: ignore[misc]
    """A deployment as a causal language model of transformers, for `generate`, pipelines and evaluations.

    The server computes and picks tokens; transformers prepares a call, and decides after each token which sequences go
    on, so that lengths, streamers and stopping criteria are its own. Padding may be on either side of prompts.

    Attributes:
        deployment: What the runtime said of the deployment.
        config: Configuration of the checkpoint, or one that says the vocabulary, the length and the ends.
        generation_config: Defaults of calls.
    """

    config_class = KilnConfig
    main_input_name = "input_ids"
    input_modalities = ("text",)
    #: Where tensors are that a call gives and takes; the weights are the server's.
    device = torch.device("cpu")
    dtype = torch.float32
    _is_stateful = False

    def __init__(
        self,
        deployment_id: str,
        address: str | None = None,
        *,
        config: PreTrainedConfig | None = None,
        generation_config: GenerationConfig | None = None,
        **connection: Any,
    ) -> None:
        """Connects to a deployment.

        Args:
            deployment_id: A deployment that is loaded.
            address: Of the runtime, `host:port`; `AsyncRuntime` says the default.
            config: Of the checkpoint, for who asks it for more than vocabulary, length and ends.
            generation_config: Defaults of calls. Default: those of the bundle.
            connection: Other arguments of `AsyncRuntime`: `tls`, `timeouts`, `token`, `allow_plaintext_token`.

        Raises:
            KilnError: The runtime does not have the deployment, or cannot be reached.
        """
        self._runtime = AsyncRuntime(address, **connection)
        self.deployment: Deployment = loop_thread.run(self._runtime.get_deployment(deployment_id))
        self.config = config or _describe(self.deployment)
        self.generation_config = generation_config or read_defaults(self.deployment.capabilities)
        self.name_or_path = self.config.name_or_path or deployment_id

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        deployment_id: str | None = None,
        address: str | None = None,
        home: Path | None = None,
        neuron_config: Mapping[str, Any] | None = None,
        optimization_level: int | None = None,
        **connection: Any,
    ) -> Self:
        """Takes configuration and generation defaults of a checkpoint, and the deployment that serves it.

        Without `deployment_id`, the services of a home compile and load the checkpoint, as `kiln run` has it: they are
        started in the background if none run, and go on until `kiln down`. All sampling parameters are served then.

        Args:
            model: Directory of a checkpoint, or its id of the Hub.
            deployment_id: A deployment that serves this checkpoint; then nothing is compiled.
            address: Of its runtime.
            home: Directory of the services. Default: that of `kiln run`.
            neuron_config: Attributes of the compile, with NxD Inference's names.
            optimization_level: Of the compile, 0 to 2; the compiler's default is 1.
            connection: Other arguments of `AsyncRuntime`, if there is an `address` or a `deployment_id`.

        Raises:
            KilnError: The checkpoint cannot be compiled or loaded, or the deployment is not there.
            ValueError: `deployment_id` is set, and so is something that says how the checkpoint is compiled.
        """
        if deployment_id is not None and (neuron_config or optimization_level is not None):
            raise ValueError(
                f"deployment {deployment_id} is compiled: neuron_config and optimization_level come too late"
            )
        if deployment_id is None:
            ready = prepare_deployment(str(model), home, dict(neuron_config or {}), optimization_level)
            model, deployment_id, address = ready.path, ready.deployment_id, ready.address
            connection = dict(ready.connection)
        config = AutoConfig.from_pretrained(model)
        try:
            defaults = GenerationConfig.from_pretrained(model)
        except OSError:  # the checkpoint has no such file
            defaults = GenerationConfig.from_model_config(config)
        return cls(deployment_id, address, config=config, generation_config=defaults, **connection)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        *,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Continues prompts as `generate` of transformers does, whose documentation explains the arguments.

        The tokens are those of the deployment: greedy without `do_sample`; else drawn with `seed`, or a seed of torch's
        generator, so that `torch.manual_seed` repeats them. Row i has the seed `seed` + i.

        Args:
            inputs: Token ids, int64 [prompts, length]; also as `input_ids`.
            generation_config: Parameters. Those of `kwargs` take precedence, and the model's own fill in the rest.
            logits_processor: Refused unless it is empty, because the server picks the tokens.
            stopping_criteria: A `StoppingCriteriaList`.
            streamer: Gets prompts and new tokens.
            kwargs: `attention_mask`, `tokenizer` beside `stop_strings`, values of a generation config, `OwnOptions`.

        Returns:
            Prompts and new tokens, int64 [prompts * num_return_sequences, longest], padded on the right; or with
            `return_dict_in_generate` a `GenerateDecoderOnlyOutput`, whose `scores` and `logits`, if asked for, have f32
            [rows, vocabulary] for each new token.

        Raises:
            FeatureNotServed: The call asks for what no server does, such as beams.
            TypeError: There is no such parameter.
            KilnError: A request has failed.
        """
        kwargs |= {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        configs = [vars(config) for config in (generation_config, self.generation_config) if config is not None]
        if unserved := [*find_unserved(kwargs, *configs)]:
            raise FeatureNotServed(unserved)
        check_options(kwargs, OwnOptions, *vars(GenerationConfig()), *_ARGUMENTS, *UNSERVED)
        own = {name: kwargs.pop(name) for name in OwnOptions.__annotations__ if name in kwargs}
        return super().generate(inputs, generation_config, streamer=streamer, own_options=own, **kwargs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        """Computes the logits behind each token of some sequences, as evaluations ask for them.

        Args:
            input_ids: int64 [rows, length], at most one token less than the deployment's longest sequence.
            attention_mask: [rows, length], 0 for padding, whose logits are 0.

        Returns:
            `logits`, f32 [rows, length, vocabulary].

        Raises:
            KilnError: A request has failed, as it does if the bundle outputs no logits or picks tokens itself.
        """
        is_real = _find_real(input_ids, attention_mask)
        prompts = _read_prompts(input_ids, is_real)
        # The sequence generates itself, so that there are logits for each of its tokens.
        options = [
            {
                "forced_token_ids": [*prompt[1:], prompt[0]],
                "max_new_tokens": len(prompt),
                "temperature": 0.0,
                "ignore_eos": True,
                "logits": True,
            }
            for prompt in prompts
        ]
        logits = torch.zeros(*input_ids.shape, self.config.get_text_config().vocab_size)
        with self._open([prompt[:1] for prompt in prompts], options) as rows:
            for row, prompt in enumerate(prompts):
                steps = [rows.next([row])[0] for _ in prompt]
                logits[row, is_real[row]] = torch.stack([_read_logits(token) for token in steps if token])
        return CausalLMOutput(logits=logits.to(input_ids.device))

    __call__ = forward

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, own_options: Any = None
    ) -> dict[str, Any]:
        """Names what `generate` hands to `_sample`, as transformers asks it."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "own_options": own_options}

    def close(self) -> None:
        """Closes the connection. Running calls raise ClientClosed."""
        loop_thread.run(self._runtime.close())

    @classmethod
    def can_generate(cls) -> bool:
        """Says yes to pipelines."""
        return True

    def to(self, *_: Any, **__: Any) -> Self:
        """Stays where it is: the server computes."""
        return self

    def eval(self) -> Self:
        """Stays as it is: the server infers only."""
        return self

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _open(self, prompts: Sequence[list[int]], options: Sequence[Mapping[str, Any]], count: int = 1) -> TokenRows:
        # More at once would only wait in the server's queue, which others use, too.
        max_streams = max(1, self.deployment.capabilities.max_batch_size // count)
        return TokenRows(
            self._runtime, self.deployment.id, prompts, options, num_sequences=count, max_streams=max_streams
        )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **others: Any,
    ) -> Any:
        """Decodes in place of the method of transformers that does so for greedy and sampled sequences."""
        count, streamer = generation_config.num_return_sequences, others.get("streamer")
        ends = [end for one in stopping_criteria if hasattr(one, "eos_token_id") for end in one.eos_token_id.tolist()]
        padding = generation_config.pad_token_id
        if padding is None:
            padding = ends[0] if ends else 0
        is_real = _find_real(input_ids, others["attention_mask"])
        prompts = _read_prompts(input_ids[::count], is_real[::count])
        record = _Record(generation_config, self.deployment.capabilities.vocab_size, logits_processor)
        own = others["own_options"] | ({"logits": True} if record.is_wanted else {})
        options = self._choose_options(generation_config, input_ids.shape[1], ends, own, len(prompts))

        is_unfinished = torch.ones_like(input_ids[:, 0], dtype=torch.bool)
        with self._open(prompts, options, count) as rows:
            while is_unfinished.any():
                # As in transformers, a row that is stopped goes on until all are, if nothing ends a sequence.
                live = (is_unfinished if ends else torch.ones_like(is_unfinished)).nonzero()[:, 0].tolist()
                tokens = zip(live, rows.next(live), strict=True)
                found = {row: token for row, token in tokens if token is not None}
                if not found:  # the deployment's sequence length ended them all
                    break
                next_tokens = torch.full_like(input_ids[:, 0], padding)
                next_tokens[[*found]] = next_tokens.new_tensor([token.id for token in found.values()])
                record.add(input_ids, found)
                input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
                is_unfinished[[row for row in live if row not in found]] = False
                is_unfinished &= ~stopping_criteria(input_ids, record.scores)
                if streamer is not None:
                    streamer.put(next_tokens.cpu())
                if ends:
                    rows.leave([row for row in live if not is_unfinished[row]])
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return input_ids
        return GenerateDecoderOnlyOutput(sequences=input_ids, scores=record.scores, logits=record.logits)

    def _choose_options(
        self, config: Any, length: int, ends: Sequence[int], own: dict[str, Any], num_prompts: int
    ) -> list[dict[str, Any]]:
        """The options of the request for each prompt."""
        options = choose_options(config, length, ends) | own
        limits = self.deployment.capabilities
        longest = min(limits.max_length, length + (limits.max_new_tokens or limits.max_length))
        if config.max_length > longest:
            _logger.warning("deployment %s ends these sequences after %s tokens", self.deployment.id, longest)
        if not config.do_sample:
            return [options] * num_prompts
        if (seed := own.get("seed")) is not None:
            seeds = [seed + row * config.num_return_sequences for row in range(num_prompts)]
        else:
            seeds = torch.randint(torch.iinfo(torch.int64).max, (num_prompts,)).tolist()
        return [options | {"seed": seed} for seed in seeds]


class _Record:
    """What a call asks to keep of each step: `logits` as the model gives them, `scores` as transformers processes them.

    A row that has ended has zeros.
    """

    def __init__(self, config: Any, vocab_size: int, logits_processor: Any) -> None:
        returns = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returns and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returns and config.output_logits else None
        self.is_wanted = self.scores is not None or self.logits is not None
        self._vocab_size, self._logits_processor = vocab_size, logits_processor

    def add(self, input_ids: Tensor, found: Mapping[int, Token]) -> None:
        """Adds the step that has found a token for some of the rows."""
        if not self.is_wanted:
            return
        step = torch.zeros(len(input_ids), self._vocab_size)
        step[[*found]] = torch.stack([_read_logits(token) for token in found.values()])
        if self.logits is not None:
            self.logits += (step,)
        if self.scores is not None:
            self.scores += (self._logits_processor(input_ids, step),)


def _describe(deployment: Deployment) -> KilnConfig:
    """What transformers asks a configuration for, of a deployment."""
    capabilities = deployment.capabilities
    return KilnConfig(
        vocab_size=capabilities.vocab_size,
        max_position_embeddings=capabilities.max_length,
        eos_token_id=[*capabilities.eos_token_ids],
    )


def _find_real(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Tells which tokens are no padding, bool in the shape of `input_ids`."""
    return torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()


def _read_prompts(input_ids: Tensor, is_real: Tensor) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(input_ids, is_real, strict=True)]


def _read_logits(token: Token) -> Tensor:
    return torch.tensor(token.logits)


AutoConfig.register(KilnConfig.model_type, KilnConfig)
AutoModelForCausalLM.register(KilnConfig, KilnForCausalLM)
