"""Embeddings through SMG, on fake ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from bundle.abi.outputs import EMBEDDINGS
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.bundles.published import CHAT_TEMPLATE
from tests.servers.gateway import run_gateway
from tests.servers.runtime import serve_runtime


async def test_the_client_of_openai_gets_the_vectors_of_embed(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        await served.deploy(flags=(*DYNAMIC_FLAGS, EMBEDDINGS), chat_template=CHAT_TEMPLATE)
        asked = pb.EmbedRequest(deployment_id="d", inputs=[pb.EmbedInput(text="hello")], normalize=True)
        (expected,) = (await served.generation.Embed(asked)).embeddings

        def ask() -> None:
            with (
                run_gateway(tmp_path, [served.address], HF_ENDPOINT="http://127.0.0.1:0") as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                answer = client.embeddings.create(model="d", input="hello", encoding_format="float")
                (one,) = answer.data
                assert one.embedding == pytest.approx([*expected.values])
                assert answer.usage.prompt_tokens == expected.prompt_tokens

        await asyncio.to_thread(ask)
