"""The parent's side of the memory that ranks exchange tensors in."""

from __future__ import annotations

import ctypes
import mmap
import os

from execution.collectives.library import load_collective_library
from execution.errors import CollectivesMissing, TooManyRanks


class CollectiveMemory:
    """Memory for the collectives of a group. `fd` is for the ranks to map; the parent only repairs it."""

    def __init__(self, tp_degree: int) -> None:
        """Makes the memory, zeroed.

        Raises:
            CollectivesMissing: The native library has not been built.
            TooManyRanks: It cannot serve so many.
        """
        library = load_collective_library()
        if library is None:
            raise CollectivesMissing(tp_degree)
        if tp_degree > (most_ranks := library.kiln_most_ranks()):
            raise TooManyRanks(tp_degree, most_ranks)
        self._library = library
        self.fd = os.memfd_create("kiln-collectives")
        os.ftruncate(self.fd, library.kiln_memory_size(tp_degree))
        self._memory = mmap.mmap(self.fd, 0)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def abort(self) -> None:
        """Fails the collective that is under way, if there is one, and all later ones."""
        self._library.kiln_abort(self._address)

    def reset(self) -> None:
        """Makes collectives possible again after a rank has failed one. No rank may be in a collective."""
        self._library.kiln_reset(self._address)

    def close(self) -> None:
        """Lets no more ranks in. The memory itself goes with this object."""
        os.close(self.fd)
