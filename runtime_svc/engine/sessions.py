"""The sessions of one deployment: who may use which, and how long each lasts."""

from __future__ import annotations

from collections.abc import Callable

from runtime_svc.engine.kv.manager import KvManager
from runtime_svc.engine.request import Request, Session, SessionLimits
from runtime_svc.errors import SessionBusy, SessionNotFound, TooManySessions


class SessionTable:
    """Sessions by owner and id. Requests open them; the scheduler ends their use.

    A session only saves work, so that one which is forgotten costs its next request a longer prefill, and no more.
    """

    def __init__(self, kv: KvManager, limits: SessionLimits, *, now: Callable[[], float]) -> None:
        """Starts empty; `now` tells the time, in seconds."""
        self._kv = kv
        self._limits = limits
        self._now = now
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        self._forget_expired()
        return len(self._sessions)

    def join(self, named: Session, request: Request) -> Session:
        """Lets a new request use the session of a name, in place of the new one that admission made."""
        self._forget_expired()
        session = self._sessions.get((named.owner, named.session_id))
        if session is None:
            self._make_room(named.owner)
            session = self._sessions[named.owner, named.session_id] = named
        elif session.user is not None:
            raise SessionBusy(session.session_id, session.user.request_id)
        session.user, session.ttl_s, session.last_used_s = request, named.ttl_s, self._now()
        return session

    def list_of(self, owner: str) -> list[Session]:
        """Lists an owner's sessions by id."""
        self._forget_expired()
        return sorted((one for one in self._sessions.values() if one.owner == owner), key=lambda one: one.session_id)

    def check_idle(self, owner: str, session_id: str) -> Session:
        """Returns a session that no request uses."""
        self._forget_expired()
        session = self._sessions.get((owner, session_id))
        if session is None:
            raise SessionNotFound(session_id)
        if session.user is not None:
            raise SessionBusy(session_id, session.user.request_id)
        return session

    def erase(self, owner: str, session_id: str) -> list[int]:
        """Ends a session, so that no request finds what it computed; returns blocks of the KV cache to overwrite."""
        session = self.check_idle(owner, session_id)
        blocks = self._kv.erase(session)
        self._end(session)
        return blocks

    def _end(self, session: Session) -> None:
        assert session.user is None, f"{session.session_id} is in use"
        del self._sessions[session.owner, session.session_id]
        self._kv.forget(session)

    def _forget_expired(self) -> None:
        now_s = self._now()
        for session in list(self._sessions.values()):
            if session.expires_s is not None and session.expires_s <= now_s:
                self._end(session)

    def _make_room(self, owner: str) -> None:
        """Forgets the sessions unused for longest, until one more of an owner's is within the limits."""
        bounds = ((self._limits.max_caller_sessions, {owner}), (self._limits.max_sessions, None))
        for limit, owners in bounds:
            sessions = [one for one in self._sessions.values() if owners is None or one.owner in owners]
            idle = sorted((one for one in sessions if one.user is None), key=lambda one: one.last_used_s)
            num_surplus = len(sessions) - limit + 1
            if num_surplus > len(idle):
                raise TooManySessions(limit, "deployment" if owners is None else "caller")
            for session in idle[: max(0, num_surplus)]:
                self._end(session)
