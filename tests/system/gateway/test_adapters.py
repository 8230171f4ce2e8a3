"""Adapters as models of SMG, on fake ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.bundles.published import CHAT_TEMPLATE
from tests.servers.adapters import BASE, HOUSE, load_adapter, publish_adapter
from tests.servers.gateway import get_json, run_gateway
from tests.servers.runtime import serve_runtime
from tests.system.runtime_process import wait_until


async def test_an_adapter_that_comes_later_serves_from_then_on(tmp_path: Path) -> None:
    names = ("house", "team/pirate:v2")
    options = [f"--engine-adapter={name}=127.0.0.1:0" for name in names]
    async with serve_runtime(tmp_path, *options) as served:
        await served.deploy(adapters=HOUSE, chat_template=CHAT_TEMPLATE, **BASE)
        addresses = [served.address, *(f"127.0.0.1:{port}" for port in served.server.edge.side_ports)]
        loop = asyncio.get_running_loop()

        def load_pirate() -> None:
            publish_adapter(served, "swords", 7)
            asyncio.run_coroutine_threadsafe(load_adapter(served, "swords", name=names[1]), loop).result()

        def ask_all() -> None:
            with (
                run_gateway(tmp_path, addresses, HF_ENDPOINT="http://127.0.0.1:0") as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                wait_until(lambda: len(get_json(f"{url}/v1/tokenizers")["tokenizers"]) == len(addresses))
                assert {model.id for model in client.models.list()} == {"d", *names}

                def ask(model: str) -> str:
                    answer = client.completions.create(model=model, prompt="hello", max_tokens=5, temperature=0)
                    return answer.choices[0].text

                with pytest.raises(openai.NotFoundError, match=f"got '{names[1]}'; accepted: house"):
                    ask(names[1])
                load_pirate()
                assert len({ask(model) for model in ("d", *names)}) == 3

        await asyncio.to_thread(ask_all)
