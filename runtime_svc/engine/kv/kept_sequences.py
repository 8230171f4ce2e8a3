"""What the KV cache keeps for sessions between their requests, who finds it, and how far a request continues it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bundle.abi.inputs import PromptLengths
from runtime_svc.engine.request import Request, Session


def find_continuation(num_written: int, num_common: int, *, rewind_limit: int | None = None) -> int:
    """Returns behind how many tokens of a session a request goes on; 0 computes all of its prompt.

    Every KV manager asks here, and may only take less. Steps of the session's last request may have written
    `num_written` positions; the request begins with the first `num_common` tokens that the cache keeps. The newest
    `rewind_limit` positions may be given up, because the cache still has what those before them attend to; None for any
    number.
    """
    if rewind_limit is not None and num_written - num_common > rewind_limit:
        return 0
    return num_common


def choose_evicted(kept: Iterable[Session]) -> Session:
    """Chooses whose part of the cache makes room: the first session, but one that a request waits for only if all are.

    There is at least one session in `kept`, and those unused for longest come first.
    """
    sessions = [*kept]
    return next((session for session in sessions if session.user is None), sessions[0])


@dataclass(slots=True)
class SessionKeeper:
    """Says what sessions keep, by what the cache of a deployment can continue; see `find_continuation`.

    Attributes:
        num_resets: How often the cache was reset, also for new weights: no request that starts later finds what was
            computed before.
    """

    rewind_limit: int | None = None
    prompt_lengths: PromptLengths | None = None
    num_resets: int = 0

    def find_prefix_root(self, request: Request, call_key: bytes = b"") -> bytes:
        """Returns what the keys of a request's prefix begin with, 32 bytes, for blocks and sessions alike.

        Requests with different roots share no part of the KV cache. The root is made of everything but tokens that keys
        and values depend on, and of who may share them; `call_key` makes that the sequences of one call.
        """
        sharing = request.owner, request.cache_salt, call_key
        computed_by = request.weight_epoch, request.adapter_digest
        parts = (*sharing, *computed_by, self._classify(request), self.num_resets)
        # JSON says where each part ends: other parts never give the same text.
        return hashlib.blake2b(msgspec.json.encode(parts), digest_size=32).digest()

    def count(self, request: Request) -> int:
        """Returns behind how many tokens of its session a request goes on; less than the request's tokens."""
        session = request.session
        if session is None or not session.token_ids or session.prefix_root != self.find_prefix_root(request):
            return 0
        return find_continuation(session.num_written, _count_common(session, request), rewind_limit=self.rewind_limit)

    def note(self, request: Request) -> Session | None:
        """Writes down for a request's session which tokens the cache keeps; None if there are none to keep.

        They are the tokens that steps which have ended computed. What a step in flight writes lies behind them, and the
        next request's steps run after it and write the same positions before they read them.
        """
        session = request.session
        token_ids = [] if session is None else request.tokens_at(0, request.num_computed_tokens)
        if session is None or not token_ids:
            return None
        session.token_ids, session.prefix_root = token_ids, self.find_prefix_root(request)
        # One step may be in flight that computes what the request has, and one behind it that was called ahead.
        session.num_written = max(request.num_written, request.num_tokens + 1)
        return session

    def _classify(self, request: Request) -> int:
        """Numbers the class of a request's prompt: equal beginnings have equal keys only within one."""
        return 0 if self.prompt_lengths is None else self.prompt_lengths.classify(len(request.prompt_token_ids))


def _count_common(session: Session, request: Request) -> int:
    held = session.token_ids
    wanted = request.tokens_at(0, min(len(held), request.num_tokens - 1))
    if wanted == held[: len(wanted)]:
        return len(wanted)
    return next(index for index, pair in enumerate(zip(held, wanted, strict=False)) if pair[0] != pair[1])
