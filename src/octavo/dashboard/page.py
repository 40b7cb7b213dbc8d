"""The files of the pages, as a server sends them or combined into one file that needs no server.

Owns: the fixed listing of static files, the headers of pages, `write_page`.
Does not: know HTTP routes, or what frames mean (trace.frames makes them).
Invariants: a name outside the listing is not served. No page loads anything from another origin. The policy of a
written page allows only its own scripts and styles, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_RULES = "img-src 'self' data: blob:; base-uri 'none'; form-action 'self'"
HEADERS: Mapping[str, str] = {
    "content-security-policy": f"default-src 'self'; {_RULES}; object-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # no-referrer would make a form's Origin null, so the login would be refused
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NO_HTML_FROM_TEXT = "; require-trusted-types-for 'script'; trusted-types 'none'"  # a request's name never becomes HTML
_IMPORT = re.compile(r'^import\s+(?:[^;]*?\s+from\s+)?"\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |function|class|const|let)", re.MULTILINE)
_CHUNK = 3 * (1 << 15)  # bytes converted to base64 at once; a multiple of three has no padding


@cache
def _listing() -> dict[str, tuple[bytes, str]]:
    return {
        path.name: (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(STATIC.iterdir())
        if path.suffix in _TYPES
    }


def asset(name: str) -> tuple[bytes, str] | None:
    """Return a file of the pages and its media type, or None. The first call reads the listing."""
    return _listing().get(name)


def text_of(name: str) -> str:
    """Return the text of a file of the pages. Raises KeyError."""
    return _listing()[name][0].decode()


def login_page(message: str, next_page: str) -> tuple[str, str]:
    """Return the login form and its content security policy. The form shows `message`, unless it is empty.

    The form needs no other file, so no other path has to be public. This function escapes both texts.
    """
    from html import escape

    style = text_of("theme.css") + text_of("login.css")
    page = text_of("login.html").replace("{style}", style)
    page = page.replace("{message}", escape(message)).replace("{next}", escape(next_page))
    return (
        page,
        f"default-src 'none'; style-src '{_hash(style)}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    )


def modules(entry: str) -> list[str]:
    """Return the module files that `entry` needs; each file follows its imports, and `entry` is last."""
    names: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in names:
            for imported in _IMPORT.findall(text_of(name)):
                visit(imported)
            names[name] = None

    visit(entry)
    return list(names)


def bundle(entry: str) -> str:
    """Return all modules of a page as one script. The modules' top-level names are distinct; a test checks this."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", text_of(name))) for name in modules(entry))


def write_page(frames: Iterable[Mapping[str, object]], path: Path | str) -> None:
    """Write the dashboard with these frames (see docs/statistics.md) as one HTML file that works offline.

    The frames are compressed one by one, so memory is bounded. Raises OSError.
    """
    style = text_of("theme.css") + text_of("dashboard.css")
    script = bundle("dashboard.js")
    allowed = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    policy = f"default-src 'none'; {allowed}; img-src data: blob:; base-uri 'none'{NO_HTML_FROM_TEXT}"
    page = text_of("dashboard.html")
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", page)
    page = re.sub(r'<script type="module" src=[^>]*></script>\n', "", page)
    head, _, rest = page.partition("</head>")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    body, _, end = rest.rpartition("</body>")
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1))
        file.write(f"<style>{style}</style>\n</head>{body}")
        file.write('<script type="application/octet-stream" id="frames">')
        file.writelines(_packed(frames))
        file.write(f'</script>\n<script type="module">{script}</script>\n</body>{end}')


def _packed(frames: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """Yield gzipped JSON lines as base64."""
    import msgspec

    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    held = bytearray()
    for frame in frames:
        held += packer.compress(msgspec.json.encode(frame) + b"\n")
        if len(held) >= _CHUNK:
            whole = len(held) - len(held) % 3
            yield base64.b64encode(held[:whole]).decode()
            del held[:whole]
    held += packer.flush()
    yield base64.b64encode(held).decode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
