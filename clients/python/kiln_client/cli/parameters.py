"""Types of command-line values."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar

import click
from google.protobuf.descriptor import EnumDescriptor

from kiln_client.documents import Document, apply_overrides, parse_document, parse_override
from kiln_client.enums import enum_names
from kiln_client.errors import DocumentInvalid

SECONDS = click.FloatRange(min=0, min_open=True)
OVERRIDE = click.option(
    "--override",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Replace a value of the configuration, such as neuron_config.seq_len=256; may be repeated.",
)
QUANTIZED_DTYPES = ("int8", "f8e4m3", "f8e5m2", "int4")
QUANTIZE = click.option(
    "--quantize",
    type=click.Choice(QUANTIZED_DTYPES),
    help="Keep the matrices of linear layers in a byte for each weight, with a scale for each output; int4: in half a "
    "byte, with two scales for each group of inputs.",
)
_MAX_DURATION_DIGITS = 6  # a protobuf duration holds ten thousand years, which a million days are not


class Integer(click.ParamType[int]):
    """An integer that the wire can carry. The server validates its value."""

    name = "integer"

    def __init__(self, least: int, most: int) -> None:
        self._range = click.IntRange(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the integer."""
        return int(self._range.convert(value, param, ctx))


INT32 = Integer(-(2**31), 2**31 - 1)
UINT64 = Integer(0, 2**64 - 1)


class DurationSeconds(click.ParamType[float]):
    """A time such as `90`, `90s`, `15m`, `12h` or `30d`. A bare number is in seconds."""

    name = "time"
    _units: ClassVar[dict[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parses the seconds. The server validates the value."""
        unit = self._units.get(value[-1:])
        number = value if unit is None else value[:-1]
        if not number.isascii() or not number.isdecimal() or len(number) > _MAX_DURATION_DIGITS:
            self.fail(f"got {value!r}; accepted: a whole number with s, m, h or d behind it", param, ctx)
        return float(int(number) * (unit or 1))


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Integers separated by commas."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parses the integers, each within 32 bits."""
        return tuple(INT32.convert(part.strip(), param, ctx) for part in value.split(","))


class TokenBias(click.ParamType[tuple[int, float]]):
    """A token id and a number, `ID=BIAS`."""

    name = "ID=BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Parses the two. The server validates them."""
        token_id, separator, bias = value.partition("=")
        if not separator:
            self.fail(f"got {value!r}; accepted: ID=BIAS, such as 42=-2.5", param, ctx)
        return INT32.convert(token_id, param, ctx), click.FLOAT.convert(bias, param, ctx)


class NamedPath(click.ParamType[tuple[str, Path]]):
    """A name and a path of this host, `NAME=PATH`."""

    name = "NAME=PATH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """Parses the two, and follows the path's links."""
        name, separator, path = value.partition("=")
        if not name or not separator or not Path(path).exists():
            self.fail(f"got {value!r}; accepted: NAME=PATH, whose PATH exists", param, ctx)
        return name, Path(path).resolve()


class StepRange(click.ParamType[tuple[int, int]]):
    """A range of steps such as `0:4`: the first step and their number. `3` is one step."""

    name = "FIRST:COUNT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Parses the two numbers. The server validates them."""
        first, separator, count = value.partition(":")
        return INT32.convert(first, param, ctx), INT32.convert(count if separator else 1, param, ctx)


class ByteSize(click.ParamType[int]):
    """A size such as `16GiB`, `512MiB` or `1000000`. A bare number is in bytes."""

    name = "size"
    _units: ClassVar[dict[str, int]] = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the bytes. The server validates the value."""
        unit = self._units.get(value[-3:])
        number = value if unit is None else value[:-3]
        if not number.isascii() or not number.isdecimal() or int(number[:20]) * (unit or 1) >= 2**63:
            self.fail(f"got {value!r}; accepted: a whole number with KiB, MiB, GiB or TiB behind it", param, ctx)
        return int(number) * (unit or 1)


class DocumentFile(click.File):
    """A file to read, or `-` for standard input. If it does not exist, the error names files with a similar name."""

    def __init__(self) -> None:
        super().__init__("rb")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> IO[Any]:
        """Opens the file."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            path = Path(str(value))
            names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            similar = [str(path.parent / name) for name in get_close_matches(path.name, names)]
            hint = f" Did you mean {' or '.join(similar)}?" if similar and not path.exists() else ""
            self.fail(f"{error.message}{'' if error.message.endswith('.') else '.'}{hint}", param, ctx)


DOCUMENT = DocumentFile()
DURATION = DurationSeconds()
BYTE_SIZE = ByteSize()


def enum_choice(enum: Any) -> click.Choice[str]:
    """Accepts the names of an enum's values."""
    descriptor: EnumDescriptor = enum.DESCRIPTOR
    return click.Choice(enum_names(descriptor))


def server_path(path: str) -> str:
    """Makes the path of a local directory absolute; returns any other path, relative to a root of the server, as is."""
    here = Path(path)
    return str(here.absolute()) if here.exists() else path


def read_configuration(file: BinaryIO | None, overrides: Sequence[str], quantize: str | None) -> dict[str, Any]:
    """Reads the configuration that the command line names, if it does, and applies `--quantize` and `--override`."""
    document = {} if file is None else read_document(file, reason="CONFIG_INVALID", field="config", infinities=True)
    if not isinstance(document, dict):
        raise DocumentInvalid(getattr(file, "name", "-"), "it holds a list", reason="CONFIG_INVALID", field="config")
    if quantize is not None:
        said = {"quantized": "true", "quantization_dtype": quantize, "quantization_type": "per_channel_symmetric"}
        overrides = [*(f"neuron_config.{name}={value}" for name, value in said.items()), *overrides]
    return apply_overrides(document, [parse_override(text) for text in overrides])


def read_document(file: BinaryIO, *, reason: str, field: str, infinities: bool = False) -> Document:
    """Reads the YAML or JSON file that the command line names; `-` is standard input."""
    source = getattr(file, "name", "-")
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentInvalid(source, f"it is not UTF-8: {error}", reason=reason, field=field) from None
    return parse_document(text, source=source, reason=reason, field=field, infinities=infinities)
