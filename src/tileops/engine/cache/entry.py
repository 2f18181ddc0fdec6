"""One entry of the kernel cache as one file that says what it is and proves that it is whole.

Four parts: a magic line; the SHA-256 of all that follows; a line of JSON; the payload (a cubin, or
nothing). A file that was cut short, changed or written by somebody else does not pass ``decode``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

__all__ = [
    "FORMAT",
    "KINDS",
    "DamagedEntryError",
    "Stored",
    "decode",
    "encode",
    "file_name",
    "parse_name",
]

FORMAT = 1
"""Changes when an older reader or an older entry must not be used; part of every key."""
KINDS = ("kernel", "choice")
_MAGIC = f"tileops cache entry {FORMAT}\n".encode()
_DIGEST = 64
_NAME = re.compile(rf"([0-9a-f]{{64}})\.({'|'.join(KINDS)})")


class DamagedEntryError(Exception):
    """Bytes that are no whole entry, or another one; the message says why."""


@dataclass(frozen=True)
class Stored:
    """One entry: ``facts`` are JSON values, ``key`` is 64 hexadecimal digits."""

    kind: str
    key: str
    facts: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


def file_name(kind: str, key: str) -> str:
    """The name under which an entry lies in a directory or a bundle."""
    return f"{key}.{kind}"


def parse_name(name: str) -> tuple[str, str] | None:
    """``(kind, key)`` of an entry's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[2], match[1]) if match else None


def encode(stored: Stored) -> bytes:
    """The file of an entry. Equal entries give equal bytes."""
    header = {
        "kind": stored.kind,
        "key": stored.key,
        "bytes": len(stored.payload),
        "facts": stored.facts,
    }
    line = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    body = line + b"\n" + stored.payload
    return _MAGIC + sha256(body).hexdigest().encode() + b"\n" + body


def decode(data: bytes, kind: str, key: str) -> Stored:
    """The entry in ``data``. Raises ``DamagedEntryError`` unless it is whole and the wanted one."""
    if not data:
        raise DamagedEntryError("it is empty")
    if not data.startswith(_MAGIC):
        raise DamagedEntryError("it is no cache entry of this format")
    begin = len(_MAGIC) + _DIGEST + 1
    body = data[begin:]
    if data[len(_MAGIC) : begin] != sha256(body).hexdigest().encode() + b"\n":
        raise DamagedEntryError("its checksum is wrong: it was cut short or changed")
    line, _, payload = body.partition(b"\n")
    header = json.loads(line)
    if (header["kind"], header["key"]) != (kind, key):
        raise DamagedEntryError(f"it is the entry {header['kind']} {header['key']}")
    return Stored(kind, key, header["facts"], payload)
