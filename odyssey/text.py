"""Text of which nobody knows whether it is Unicode: names of files, arguments, what an exception quotes.

Python keeps bytes that are no UTF-8 as lone surrogates (PEP 383), which neither JSON nor msgpack can carry. What is logged or
sent for people to read spells them as Python does on stderr, `\\udcff` for the byte 0xff.
"""

from __future__ import annotations

from typing import Any


def as_unicode(text: str) -> str:
    """`text`, with all that is no Unicode spelled out."""
    return text.encode(errors="backslashreplace").decode()


def all_as_unicode(value: Any) -> Any:
    """The same of every text in what is made of dictionaries, lists and tuples."""
    if isinstance(value, str):
        return as_unicode(value)
    if isinstance(value, dict):
        return {all_as_unicode(key): all_as_unicode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_as_unicode(item) for item in value]
    return value
