"""Connections that may not be slow: who sends no whole request in time, or does not take an answer, is cut off."""

from __future__ import annotations

import asyncio
from typing import Any

from leafward.errors import require

#: Seconds that a connection may take for a request, and for each part of an answer.
PATIENCE = 4.0


def prompt_protocol(patience: float = PATIENCE) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP/1.1 with these bounds; its own timeout is of idle connections alone."""
    base = require("uvicorn.protocols.http.h11_impl", "serve").H11Protocol

    class Prompt(base):
        _request: asyncio.TimerHandle | None = None
        _answer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._request = self.loop.call_later(patience, self._no_request)

        def on_response_complete(self) -> None:
            _stop(self._request)
            self._request = self.loop.call_later(patience, self._no_request)
            super().on_response_complete()

        def _no_request(self) -> None:
            if self.cycle is None or self.cycle.response_complete:  # else an answer is on its way
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._answer = self.loop.call_later(patience, self.transport.abort)

        def resume_writing(self) -> None:
            _stop(self._answer)
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            _stop(self._request)
            _stop(self._answer)
            super().connection_lost(exc)

    return Prompt


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
