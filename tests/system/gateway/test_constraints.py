"""Constraints of OpenAI's client through SMG, on fake ranks that keep masks."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import openai
import pydantic
import pytest

from tests.bundles.manifests import DYNAMIC
from tests.bundles.published import CHAT_TEMPLATE
from tests.servers.gateway import run_gateway
from tests.servers.runtime import serve_runtime

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


class Mood(pydantic.BaseModel):
    """What an answer is parsed as."""

    model_config = pydantic.ConfigDict(extra="forbid")

    mood: Literal["glad", "sad"]
    sure: bool


def check(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="d", messages=MESSAGES, response_format=Mood, temperature=0)
    assert isinstance(parsed.choices[0].message.parsed, Mood)
    assert parsed.choices[0].finish_reason == "stop"
    whole = client.chat.completions.create(
        model="d", messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=20
    )
    assert str(whole.choices[0].message.content).startswith("{")
    answer = client.completions.create(model="d", prompt="hi", temperature=0, extra_body={"regex": "(cat|dog)s"})
    assert re.fullmatch("(cat|dog)s", answer.choices[0].text)
    schema = {"name": "no", "schema": {"type": "integer", "not": {"const": 1}}}
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.json_schema"):
        client.chat.completions.create(
            model="d",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[typeddict-item]
        )
    assert json.loads(str(parsed.choices[0].message.content)).keys() == {"mood", "sure"}


async def test_answers_keep_their_response_format(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        await served.deploy(sampling=msgspec.structs.replace(DYNAMIC, mode="host"), chat_template=CHAT_TEMPLATE)

        def ask() -> None:
            with (
                run_gateway(tmp_path, [served.address], HF_ENDPOINT="http://127.0.0.1:0") as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
            ):
                check(client)

        await asyncio.to_thread(ask)
