"""The local server: a fixed table of answers behind a token, on loopback.

No path of a request reaches the file system: everything that can be asked for is collected in memory at the start and
looked up by name. `Guard` stands before all of it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from leafward.errors import LeafwardError, UsageError, require
from leafward.explorer.export import KINDS, page_files, static_page
from leafward.explorer.scene import Scene, to_json
from leafward.explorer.sockets import prompt_protocol

JSON, BINARY = "application/json", "application/octet-stream"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Characters of a request's path, and of its query.
LONGEST_ADDRESS = 512


class Guard:
    """Refuses what may not pass; what may goes on to `app`, without the token in its path.

    Another web site can make a browser send requests here and, by giving its own name the address 127.0.0.1, even read
    the answers; hence the token, and the checks of Host, Origin and Sec-Fetch-Site.
    """

    def __init__(self, app: Any, token: str, hosts: Iterable[str]) -> None:
        self.app, self.prefix, self.hosts = app, f"/{token}/", frozenset(hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif (refusal := self.refusal(scope)) is not None:
            await _answer(to_json({"error": refusal[1]}), JSON, refusal[0])(scope, receive, send)
        else:
            path = scope["path"][len(self.prefix) - 1 :]
            await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    def refusal(self, scope: Any) -> tuple[int, str] | None:
        """Status and sentence for a request that must not pass."""
        headers: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"):
                if name in headers:
                    return 400, f"the header {name.decode()} is there twice"
                headers[name] = value.decode("latin-1")
        if headers.get(b"host") not in self.hosts:
            return 421, "this server does not answer under that host name"
        if b"origin" in headers and headers[b"origin"] not in {f"http://{host}" for host in self.hosts}:
            return 403, "requests of another origin are refused"
        if headers.get(b"sec-fetch-site", "none") not in ("none", "same-origin") and not self._opens(scope, headers):
            return 403, "requests of another site are refused"
        if max(len(scope["path"]), len(scope["query_string"])) > LONGEST_ADDRESS:
            return 414, f"the address is longer than {LONGEST_ADDRESS} characters"
        start = scope["path"][: len(self.prefix)].encode("utf-8", "replace")
        if not secrets.compare_digest(start, self.prefix.encode()):
            return 404, "not found"
        if scope["method"] != "GET":
            return 405, "only GET is answered"
        return None

    def _opens(self, scope: Any, headers: Mapping[bytes, str]) -> bool:
        """Whether a link opens the page itself in a tab, as that in the file does which the browser is started with.

        Who has the link has the token; and a page that opens a tab of another origin cannot look into it.
        """
        tab = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
        return tab == ("navigate", "document") and scope["path"] == self.prefix


def create_app(scene: Scene, token: str, hosts: Iterable[str]) -> Guard:
    """The ASGI application that serves a scene under /TOKEN/, to requests that name one of the hosts (HOST:PORT)."""
    fastapi = require("fastapi", "serve")
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    table, views = _table(scene), {view.key: view for view in scene.views}
    page: list[bytes] = []  # the static page, once somebody asked for it
    busy = Lock()

    @app.get("/neighbours.json")
    def neighbours(view: str = "", id: str = "") -> Any:
        row = _row(id, len(scene))
        if view not in views:
            return _wrong(f"view must be one of {', '.join(views)}", 400)
        if row is None:
            return _wrong(f"id must be a whole number from 0 to {len(scene) - 1}", 400)
        ids, gaps = views[view].neighbours.of(torch.tensor([row]), scene.k)
        return _answer(to_json({"ids": ids[0].tolist(), "distances": gaps[0].tolist()}), JSON)

    @app.get("/thumb/{id}")
    def thumbnail(id: str) -> Any:
        row = _row(id, len(scene))
        if row is None or row not in scene.thumbnails:
            return _wrong("there is no such thumbnail")
        return _answer(scene.thumbnails[row], "image/jpeg")

    @app.get("/export.html")
    def export() -> Any:
        with busy:
            if not page:
                page.append(static_page(scene).encode())
        return _answer(page[0], KINDS[".html"], 200, {"content-disposition": "attachment"})

    @app.get("/{name:path}")
    def part(name: str) -> Any:
        return _answer(*table[name]) if name in table else _wrong("not found")

    return Guard(app, token, hosts)


def _table(scene: Scene) -> dict[str, tuple[bytes, str]]:
    """Name -> content and type of everything that is there from the start."""
    files = page_files()
    table = {f"page/{name}": (content, KINDS[Path(name).suffix]) for name, content in files.items()}
    table[""] = files["index.html"], KINDS[".html"]
    for name, content in scene.parts().items():
        table[name] = content, JSON if name.endswith(".json") else BINARY
    table["scene.json"] = to_json(scene.describe("server")), JSON
    return table


def _answer(content: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    from fastapi import Response

    return Response(content, status, HEADERS | dict(headers or {}), kind)


def _wrong(error: str, status: int = 404) -> Any:
    return _answer(to_json({"error": error}), JSON, status)


def _row(text: str, count: int) -> int | None:
    """The number of a point, or None where it is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        return None
    return int(text) if int(text) < count else None


def serve(scene: Scene, ready: Callable[[str], None], host: str = LOOPBACK[0], port: int = 0) -> None:
    """Serve until interrupted; `ready(url)` is called once the port is bound. Port 0 takes a free one."""
    uvicorn = require("uvicorn", "serve")
    token = secrets.token_urlsafe(24)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.create_server(found[4][:2], family=found[0])
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LeafwardError(f"cannot listen on {host}, port {port}: {reason}") from error
    with bound:
        number = bound.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        names = {name, *LOOPBACK[:2], "[::1]"} if host in LOOPBACK else {name}
        app = create_app(scene, token, {f"{each}:{number}" for each in names})
        config = uvicorn.Config(
            app,
            log_level="warning",
            server_header=False,
            date_header=False,
            ws="none",
            lifespan="off",  # there is nothing to start or stop, and a second Ctrl-C would print its traceback
            http=prompt_protocol(),
        )
        ready(f"http://{name}:{number}/{token}/")
        uvicorn.Server(config).run(sockets=[bound])


def check_host(host: str, remote: bool) -> None:
    """Refuse to be seen by other machines unless that was asked for, and then under a name that can be checked."""
    if host in LOOPBACK:
        return
    if not remote:
        raise UsageError(
            f"--host {host} can be reached by other machines, and whoever has the address sees the data: "
            f"add --allow-remote if that is meant, or use one of {', '.join(LOOPBACK)}"
        )
    if host in ("", "0.0.0.0", "::", "*"):
        raise UsageError(
            f"--host {host!r} is every address; give the one name or address that the page is opened under"
        )
