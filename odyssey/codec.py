"""Where bytes from outside become values: whatever is wrong with them is `Malformed`, and nothing else.

Sockets carry msgpack (`Packed`), files JSON (`Json`). JSON has no word for a float that is not finite: `to_json` writes it as
a string, `"NaN"`, `"Infinity"` or `"-Infinity"`, and `Json` reads that as the float that it is. No torch, cheap to import.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any

import msgspec

from odyssey.text import all_as_unicode

MAX_WHY = 300
"""Characters of a reason, part of which the other side has written."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Name = Annotated[str, msgspec.Meta(max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""What another host calls something, and people are shown."""
MAX_COUNT = 1 << 24
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""A number of ranks, agents, restarts: what no cluster reaches is a mistake, and would be one of memory here."""
Pid = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
SignalNumber = Annotated[int, msgspec.Meta(ge=1, le=64)]


def check_ip_address(text: str) -> None:
    """Raises ValueError for a name: another host's word is never looked up, which takes as long as some name server likes."""
    ipaddress.ip_address(text)


class Malformed(Exception):
    """Bytes that are not what was expected. The text says why, in a line for people."""


def for_people(text: str, limit: int) -> str:
    """What another process has written, without what a terminal would obey, and not more than `limit` characters of it."""
    cut = text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], cut)


def field_first(text: str) -> str:
    """An error of msgspec's as ours are written: ``Expected `int` - at `$.hidden` `` becomes ``hidden: expected `int` ``."""
    match = re.fullmatch(r"(.)(.*) - at `\$\.?(.*)`", text, re.DOTALL)
    if match is None:
        return text[:1].lower() + text[1:]
    what = match[1].lower() + match[2]
    return f"{match[3]}: {what}" if match[3] else what


class Packed:
    """Reads msgpack into `kind`."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | msgspec.Raw) -> Any:
        """Raises Malformed."""
        try:
            return self._decoder.decode(data)
        except Exception as error:  # of msgspec, UTF-8, recursion, memory, …: it has done nothing but read `data`
            raise _malformed(error) from None


class Json:
    """Reads what `to_json` wrote into `kind`."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._with_strings_as_floats = msgspec.json.Decoder(kind, strict=False)

    def decode(self, data: bytes | str) -> Any:
        """Raises Malformed."""
        try:
            text = data.encode() if isinstance(data, str) else data
            has_strings = b'"NaN"' in text or b'Infinity"' in text
            return (self._with_strings_as_floats if has_strings else self._decoder).decode(text)
        except Exception as error:  # as above
            raise _malformed(error) from None


def to_json(value: Any) -> bytes:
    """One line. What msgspec would write as `null` for want of a word is spelled out, and so is text that is no Unicode."""
    try:
        text = msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_spelled(all_as_unicode(msgspec.to_builtins(value))))
    if b"null" not in text:  # nearly always, above all for a step
        return text
    return msgspec.json.encode(_spelled(msgspec.to_builtins(value)))


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value


def _malformed(error: Exception) -> Malformed:
    text = str(error) if isinstance(error, msgspec.MsgspecError) else f"{type(error).__name__}: {error}"
    return Malformed(for_people(text, MAX_WHY).replace("\n", " "))
