"""The deployments file: what it may say, and every mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_svc.deployments.declared import MAX_FILE_BYTES, read_deployments
from runtime_svc.deployments.deployment_spec import DeploymentSpec
from runtime_svc.deployments.errors import DeploymentsFileInvalid

YAML = """
- id: chat
  ref: story@prod
  cores: [0, 1]
  threads_per_core: 2
  follow_alias: true
  target_inter_token_latency: 0.25
- {id: plain, ref: "story:v3"}
"""
CHAT = DeploymentSpec("chat", "story@prod", (0, 1), 2, True, 0.25)


def read(tmp_path: Path, text: str | bytes) -> tuple[DeploymentSpec, ...]:
    path = tmp_path / "deployments.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_deployments(path)


def mistakes(tmp_path: Path, text: str | bytes) -> list[tuple[str, str]]:
    with pytest.raises(DeploymentsFileInvalid) as caught:
        read(tmp_path, text)
    return [(violation.field, violation.value) for violation in caught.value.violations]


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    assert read(tmp_path, YAML) == (CHAT, DeploymentSpec("plain", "story:v3"))
    json = (
        '[{"id": "chat", "ref": "story@prod", "cores": [0, 1], "threads_per_core": 2, "follow_alias": true,'
        ' "target_inter_token_latency": 0.25}]'
    )
    assert read(tmp_path, json) == (CHAT,)


@pytest.mark.parametrize("text", ["", "[]", "# nothing yet\n"])
def test_empty_file_declares_nothing(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == ()


def test_every_mistake_is_named(tmp_path: Path) -> None:
    text = """
- 7
- {ref: story}
- {id: a, ref: story, core: 1}
- {id: b, ref: story, cores: [0, 0]}
- {id: c, ref: story, cores: [-1]}
- {id: d, ref: story, cores: 1}
- {id: e, ref: story, threads_per_core: 0}
- {id: f, ref: story, threads_per_core: true}
- {id: g, ref: story, follow_alias: true}
- {id: h, ref: "story@prod", follow_alias: 1}
- {id: A, ref: "No Such"}
- {id: i, ref: story, target_inter_token_latency: 0}
- {id: j, ref: story, target_inter_token_latency: .nan}
- {id: k, ref: story, target_inter_token_latency: 200ms}
- {id: l, ref: story, target_inter_token_latency: true}
- {id: same, ref: story}
- {id: same, ref: story}
"""
    assert mistakes(tmp_path, text) == [
        ("[0]", "7"),
        ("[1].id", "nothing"),
        ("[2].core", "1"),
        ("[3].cores", "a list"),
        ("[4].cores", "a list"),
        ("[5].cores", "1"),
        ("[6].threads_per_core", "0"),
        ("[7].threads_per_core", "True"),
        ("[8].ref", "'story'"),
        ("[9].follow_alias", "1"),
        ("[10].id", "'A'"),
        ("[10].ref", "'No Such'"),
        ("[11].target_inter_token_latency", "0 s"),
        ("[12].target_inter_token_latency", "nan s"),
        ("[13].target_inter_token_latency", "'200ms'"),
        ("[14].target_inter_token_latency", "True"),
        ("[15].id", "'same'"),
        ("[16].id", "'same'"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{id: a, ref: story}",
        "- {id: a, id: b, ref: story}",
        "- id: a\n  ref: [",
        "- !!python/object/apply:os.system [true]",
        b"\xff\xfe\x00",
        "- {? [a, b] : 1}",
        "[" * 5000,
        "#" * (MAX_FILE_BYTES + 1),
    ],
)
def test_what_is_no_list_of_mappings(tmp_path: Path, text: str | bytes) -> None:
    assert [field for field, _ in mistakes(tmp_path, text)] == ["file"]


def test_endless_value_is_not_written_out(tmp_path: Path) -> None:
    bomb = "- &a [x, x]\n" + "".join(f"- &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20))
    assert {value for _, value in mistakes(tmp_path, bomb)} == {"a list"}
    in_cores = "- {id: a, ref: story, cores: &a [0]}\n- {id: b, ref: story, cores: [[*a, *a], *a]}"
    assert mistakes(tmp_path, in_cores) == [("[1].cores", "a list")]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DeploymentsFileInvalid, match="No such file"):
        read_deployments(tmp_path / "nothing.yaml")
