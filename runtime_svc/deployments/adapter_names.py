"""What the names of a deployment's adapters mean, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from bundle.manifest import BundledAdapter
from bundle.store.reader import Bundle
from runtime_svc.bundles.private_files import PrivateFiles
from runtime_svc.deployments.errors import AdapterExists, TooManyAdapters
from runtime_svc.deployments.records import AdapterRecord

#: Names that principals may have in one deployment, those of its own bundle apart, and one principal of them.
MAX_ADAPTERS: Final = 10_000
MAX_CALLER_ADAPTERS: Final = 1_000
#: Names that an error lists as what it would accept.
MAX_LISTED_NAMES: Final = 8


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter, one for each rank, in a verified bundle of the library.

    There is one for each of many adapters, so it holds no manifest.
    """

    bundle_digest: str
    paths_by_rank: Mapping[int, Path]
    files: PrivateFiles

    @classmethod
    def of(cls, adapter: BundledAdapter, bundle: Bundle) -> AdapterFiles:
        """Finds the files of an adapter in its bundle."""
        assert isinstance(bundle.layout, PrivateFiles), "a bundle of the library"
        paths = {shard.rank: bundle.blob_path(shard.blob) for shard in adapter.shards if shard.blob is not None}
        return cls(bundle.digest, paths, bundle.layout)


class AdapterNames:
    """The adapters of a deployment by owner and name.

    Each principal has names of its own, which no other finds. They come before those of the deployment's bundle.
    """

    def __init__(self, records: Iterable[AdapterRecord] = ()) -> None:
        """Starts with the adapters of an earlier process, whose files are not opened."""
        self._records: dict[str | None, dict[str, AdapterRecord]] = {}
        self._num_owned = 0
        #: By key, those of an earlier process until their files are opened; who opens them holds the lock.
        self.unopened: dict[str, asyncio.Lock] = {}
        for record in records:
            self.add(record)
            self.unopened[record.key] = asyncio.Lock()

    def __len__(self) -> int:
        return self._num_owned + len(self._records.get(None, {}))

    def add(self, record: AdapterRecord) -> None:
        """Makes a name of an owner mean an adapter."""
        names = self._records.setdefault(record.owner, {})
        self._num_owned += record.owner is not None and record.name not in names
        names[record.name] = record
        self.unopened.pop(record.key, None)

    def remove(self, record: AdapterRecord) -> None:
        """Takes the meaning from a name that has one."""
        names = self._records[record.owner]
        del names[record.name]
        self.unopened.pop(record.key, None)
        self._num_owned -= record.owner is not None
        if not names:
            del self._records[record.owner]

    def find(self, caller: str, name: str) -> AdapterRecord | None:
        """Returns what a name in a caller's request means; None if the caller can name no such adapter."""
        return self.find_own(caller, name) or self._records.get(None, {}).get(name)

    def find_own(self, caller: str, name: str) -> AdapterRecord | None:
        """Returns what a name of a caller's own means; None if the caller has loaded no such adapter."""
        return self._records.get(caller, {}).get(name)

    def require_room(self, record: AdapterRecord, *, replace: bool) -> None:
        """Checks that an adapter may get its name: no other adapter has it, and there is room for one more.

        Raises:
            AdapterExists: The owner's name means another adapter, and `replace` is False.
            TooManyAdapters: The owner or the deployment has as many names as it may.
        """
        assert record.owner is not None, "an adapter of a principal"
        names = self._records.get(record.owner, {})
        if (known := names.get(record.name)) is not None:
            if known.digest != record.digest and not replace:
                raise AdapterExists(record.name, known.digest, record.digest)
        elif len(names) >= MAX_CALLER_ADAPTERS:
            raise TooManyAdapters("principal", MAX_CALLER_ADAPTERS)
        elif self._num_owned >= MAX_ADAPTERS:
            raise TooManyAdapters("deployment", MAX_ADAPTERS)

    def list_owned(self) -> list[AdapterRecord]:
        """Returns every adapter that principals have loaded."""
        return [one for owner, names in self._records.items() if owner is not None for one in names.values()]

    def list_of(self, caller: str | None) -> list[AdapterRecord]:
        """Returns what a caller's requests can name, by name; with None as the caller, what any caller's can."""
        if caller is None:
            everything = chain.from_iterable(names.values() for names in self._records.values())
            return sorted(everything, key=lambda record: record.key)
        visible = self._records.get(None, {}) | self._records.get(caller, {})
        return [visible[name] for name in sorted(visible)]

    def list_accepted(self, caller: str, *, only_own: bool = False) -> str:
        """Says which names an error would accept of a caller: a few of them."""
        names = sorted({**({} if only_own else self._records.get(None, {})), **self._records.get(caller, {})})
        listed = [*names[:MAX_LISTED_NAMES], *["…"] * (len(names) > MAX_LISTED_NAMES)]
        return ", ".join(listed) or "none: LoadAdapter (`kiln adapters load`) loads one for the caller"
