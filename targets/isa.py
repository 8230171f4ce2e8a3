"""Instruction sets: those for which a target's executables can be made, and those that this host has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from targets.errors import IsaUnknown, IsaUnsupported

#: The name by which a client asks for the highest level that the compiler's host has.
NATIVE: Final = "native"
CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class IsaLevel:
    """One instruction set.

    Attributes:
        added_flags: CPU flags, as in /proc/cpuinfo, that the level adds to the one before it.
        march: What g++ takes as `-march`.
        extensions: Options of g++ for instructions beyond `march`.
        gain: What executables of the level before it take more or less time for, with this one, as measured.
    """

    name: str
    added_flags: frozenset[str]
    vector_bits: int
    march: str
    extensions: tuple[str, ...] = ()
    gain: str = ""

    @property
    def compiler_options(self) -> tuple[str, ...]:
        """Options with which g++ uses this level's instructions and no others."""
        return (f"-march={self.march}", *self.extensions)


@dataclass(frozen=True, slots=True)
class IsaLevels:
    """The instruction sets of a target, each a superset of the one before it; empty if the target has no choice."""

    levels: tuple[IsaLevel, ...] = ()
    default: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all levels, lowest first."""
        return tuple(level.name for level in self.levels)

    def __getitem__(self, name: str) -> IsaLevel:
        """Returns the level of a name that `resolve` returned."""
        return next(level for level in self.levels if level.name == name)

    def list_supported(self, cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
        """Lists the levels whose instructions all processors of this host have, lowest first; none on other
        architectures."""
        flags: set[str] = set()
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                flags = set(value.split())
                break
        supported = []
        for level in self.levels:
            if not flags.issuperset(level.added_flags):
                break
            supported.append(level.name)
        return tuple(supported)

    def resolve(self, name: str, cpuinfo: Path = CPUINFO, *, default: str = "") -> str:
        """Fills in the default, turns `native` into the highest level that this host has, and checks other names.

        The result is a level, never the host's processor model, so that a runtime can tell by the name whether it can
        run a bundle. `default` is a level or `native`, instead of the target's own; a target without levels has none.
        """
        if not name and self.levels:
            name = default
        if name == NATIVE:
            supported = self.list_supported(cpuinfo)
            if not supported:
                raise IsaUnsupported(name, supported, self.names)
            return supported[-1]
        if name and name not in self.names:
            raise IsaUnknown(name, (*self.names, NATIVE))
        return name or self.default

    def list_unused(self, name: str, cpuinfo: Path = CPUINFO) -> tuple[IsaLevel, ...]:
        """Lists the levels of this host above the named one, lowest first; executables for that one use none."""
        supported = self.list_supported(cpuinfo)
        above = supported[supported.index(name) + 1 :] if name in supported else ()
        return tuple(self[level] for level in above)

    def require(self, name: str, cpuinfo: Path = CPUINFO) -> None:
        """Checks that this host has a level."""
        supported = self.list_supported(cpuinfo)
        if name not in supported:
            raise IsaUnsupported(name, supported, self.names)
