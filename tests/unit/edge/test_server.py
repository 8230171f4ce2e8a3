"""Connections are counted from the kernel's tables of sockets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.server import count_connections
from edge.surroundings import peer_address

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TABLES = {
    "tcp": [
        "   0: 0100007F:C383 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0",
        "   1: 0100007F:C383 0100007F:A001 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 0 10 -1",
        "   2: 0100007F:A001 0100007F:C383 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 20 4 0 10 -1",
        "   3: 0100007F:C383 0100007F:A002 06 00000000:00000000 03:00000000 00000000     0        0 0 3 0",
    ],
    "tcp6": [
        "   0: 00000000000000000000000001000000:C383 00000000000000000000000001000000:A003 01 0:0 0:0 0 0 0 4 1 0",
    ],
}


def test_established_connections_to_the_port_count(tmp_path: Path) -> None:
    for name, lines in TABLES.items():
        (tmp_path / name).write_text(HEAD + "".join(f"{line}\n" for line in lines))
    assert count_connections(0xC383, tmp_path) == 2
    assert count_connections(0xC384, tmp_path) == 0


def test_a_host_without_the_tables_has_none(tmp_path: Path) -> None:
    assert count_connections(50051, tmp_path) == 0


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41234", "ipv4:10.0.0.7"),
        ("ipv6:%5Bfd00::7%5D:41234", "ipv6:%5Bfd00::7%5D"),
        ("unix:", "unix:"),
        ("unix:/run/kiln.sock", "unix:/run/kiln.sock"),
    ],
)
def test_a_peer_is_its_address_without_the_port(peer: str, address: str) -> None:
    context: Any = SimpleNamespace(peer=lambda: peer)
    assert peer_address(context) == address
