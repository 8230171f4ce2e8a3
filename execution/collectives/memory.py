"""The parent's side of the memory through which ranks exchange tensors."""

from __future__ import annotations

import ctypes
import os

from execution.collectives.library import load_collective_library
from execution.errors import CollectivesMissing, TooManyRanks
from execution.shared_memory import map_shared


class CollectiveMemory:
    """Memory for the collectives of a group. The ranks map `fd`; the parent only repairs the memory."""

    def __init__(self, tp_degree: int) -> None:
        library = load_collective_library()
        if library is None:
            raise CollectivesMissing(tp_degree)
        if tp_degree > (max_ranks := library.kiln_max_ranks()):
            raise TooManyRanks(tp_degree, max_ranks)
        self._library = library
        self.fd, self._memory = map_shared("kiln-collectives", library.kiln_memory_size(tp_degree))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._is_closed = False

    def abort(self) -> None:
        """Fails the running collective, if any, and all later ones. Has no effect once the memory is closed."""
        if not self._is_closed:
            self._library.kiln_abort(self._address)

    def reset(self) -> None:
        """Allows collectives again after a rank has failed one. No rank may be in one. Has no effect once closed."""
        if not self._is_closed:
            self._library.kiln_reset(self._address)

    def close(self) -> None:
        """Gives the memory back to the host. The ranks must have ended."""
        self._is_closed = True
        self._memory.close()
        os.close(self.fd)
