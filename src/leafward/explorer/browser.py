"""Opening the page without telling every user of the machine its address."""

from __future__ import annotations

import html
import shutil
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def redirect(url: str) -> Iterator[Path]:
    """A page that only this user can read, which leads to `url`.

    The words of a command are seen by all users of a machine (`ps`), and a browser is started with the address among
    them: so the address that it is started with must not hold the token.
    """
    folder = Path(tempfile.mkdtemp(prefix="leafward-"))  # 0700
    try:
        page = folder / "explorer.html"
        address = html.escape(url)
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={address}"><a href="{address}">leafward explore</a>\n',
            encoding="utf-8",
        )
        yield page
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_page(page: Path) -> None:
    """Start the user's browser on a page of `redirect`."""
    webbrowser.open(page.as_uri())
