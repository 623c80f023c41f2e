"""The page at `/`: one file, and the policy under which a browser runs nothing but what is in it. Knows no requests."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    """The bytes of the page, and its header Content-Security-Policy."""

    body: bytes
    policy: str


@cache
def page() -> Page:
    """Reads the file once. Its inline blocks are allowed by their hashes: change one, and its hash follows."""
    body = files("lever.server").joinpath("page.html").read_bytes()
    directives = {
        "default-src": "'none'",
        "script-src": _hashes(body, "script"),
        "style-src": _hashes(body, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(body, "; ".join(f"{name} {value}" for name, value in directives.items()))


def _hashes(body: bytes, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block).digest()).decode() for block in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
