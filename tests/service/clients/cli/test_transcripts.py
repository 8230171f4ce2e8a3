"""Commands, what they ask of the server, and what they print, whole: `transcripts/*.txt`.

A line `@ SCENE` names the answers of the server (`scenes.py`), and `$ kiln …` a command, which runs in a directory with
`FILES`, in a transcript `/HERE`. Below it stand the requests (`>`), standard output (two blanks in front), standard
error (`!`), the exit code (`=`), unless it is 0, and the files that it wrote (`+`). A command line is written by hand,
the rest by `KILN_WRITE_TRANSCRIPTS=1 pytest` of this file, and read before it is committed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf import text_format

from tests.servers.scripted_server import ScriptedServer
from tests.service.clients.cli.scenes import SCENES
from tests.service.clients.conftest import Outcome

#: What the current directory of every command has.
FILES: Final = {
    "config.yaml": b"neuron_config: {seq_len: 256}\n",
    "neuron_config.json": b'{"neuron_config": {"seq_len": 128, "quantize_clamp_bound": Infinity}, "rope_theta": 1e4}',
    "unfinished.yaml": b"neuron_config: {seq_len: 256",
    "repeated.yaml": b"neuron_config:\n  seq_len: 1\n  seq_len: 2\n",
    "list.yaml": b"- seq_len: 256\n",
    "empty.yaml": b"",
    "latin.yaml": b"neuron_config: \xff",
    "chat.json": b'[{"role": "user", "content": "hi"}]',
    "chat.yaml": b"messages:\n- {role: user, content: hi}\n",
    "misspelt.yaml": b"[{rol: user}]",
    "hello.yaml": b"hello",
    "models/tiny/config.json": b"{}",
}
TRANSCRIPTS = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
IS_WRITTEN = bool(os.environ.get("KILN_WRITE_TRANSCRIPTS"))


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(
    transcript: Path,
    server: ScriptedServer,
    kiln: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    written = transcript.read_text()
    lines: list[str] = []
    scene: dict[str, Any] = {}
    for line in written.splitlines():
        if line.startswith(("#", "@")):
            lines += [""] * (line[0] == "@" and bool(lines)) + [line]
        if line.startswith("@ "):
            scene = SCENES[line.removeprefix("@ ")]
        elif line.startswith("$ kiln "):
            server.requests.clear()
            for method, answer in scene.items():
                server.script(method, *(answer if isinstance(answer, tuple) else (answer,)))
            before = files()
            outcome = kiln(*shlex.split(line.replace("/HERE", str(tmp_path)))[2:])
            lines += [line, *(one.replace(str(tmp_path), "/HERE") for one in tell(server, outcome))]
            lines += [f"+ {name} {content!r}" for name, content in files().items() if before.get(name) != content]
    shown = "\n".join(lines) + "\n"
    if IS_WRITTEN:
        transcript.write_text(shown)
    assert shown == written


def files() -> dict[str, bytes]:
    """What the current directory has."""
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


def tell(server: ScriptedServer, outcome: Outcome) -> Iterator[str]:
    return chain(requests_of(server), what_is_printed(outcome))


def requests_of(server: ScriptedServer) -> Iterator[str]:
    for method, requests in server.requests.items():
        for request in requests:
            yield f"> {method} {text_format.MessageToString(request, as_one_line=True)}".rstrip()


def what_is_printed(outcome: Outcome) -> Iterator[str]:
    yield from (f"  {line}".rstrip() for line in outcome.out.splitlines())
    yield from (f"! {line}".rstrip() for line in outcome.err.splitlines())
    if outcome.exit_code:
        yield f"= {outcome.exit_code}"


def test_every_scene_is_in_a_transcript() -> None:
    lines = {line for path in TRANSCRIPTS for line in path.read_text().splitlines()}
    assert [scene for scene in SCENES if f"@ {scene}" not in lines] == []
