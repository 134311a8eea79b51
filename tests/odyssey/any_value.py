"""Hypothesis strategies for every value that a type of messages, events or files allows, constraints included."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

Strategy = st.SearchStrategy[Any]
ODD_FLOATS = st.sampled_from(
    [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        0.0,
        5e-324,
        -5e-324,
        2.2250738585072014e-308,
        1.7976931348623157e308,
        0.1 + 0.2,
        1e16,
    ]
)
ODD_TEXT = st.sampled_from(["", "NaN", "Infinity", "-Infinity", "null", '"NaN"', "\n\x1b[2J", "rank\u2028"])


def values_of(kind: Any) -> Strategy:
    """Whatever msgspec would accept as `kind`. Collections are small."""
    return _of(inspect.type_info(kind), {})


def _of(info: inspect.Type, known: dict[type, Strategy]) -> Strategy:
    match info:
        case inspect.StructType(cls=cls):
            if cls not in known:
                known[cls] = st.deferred(lambda: built)
                fields = {field.name: _of(field.type, known) for field in info.fields}
                built = _made(cls, fields)
            return known[cls]
        case inspect.UnionType(types=types):
            return st.one_of(*(_of(one, known) for one in types))
        case inspect.FloatType(gt=gt, ge=ge, le=le):
            return st.one_of(ODD_FLOATS, st.floats()).filter(lambda x: _is_within(x, gt, ge, le))
        case inspect.IntType(gt=gt, ge=ge, le=le):
            least = ge if ge is not None else gt + 1 if gt is not None else -(1 << 63)
            return st.integers(least, le if le is not None else (1 << 63) - 1)
        case inspect.StrType(max_length=longest, pattern=None):
            return st.one_of(ODD_TEXT, st.text(st.characters(codec="utf-8"), max_size=min(longest or 8, 8)))
        case inspect.StrType():
            return st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=most or 8)
        case inspect.NoneType():
            return st.none()
        case inspect.VarTupleType(item_type=item, min_length=least):
            return st.lists(_of(item, known), min_size=least or 0, max_size=max(2, least or 0)).map(tuple)
        case inspect.ListType(item_type=item):
            return st.lists(_of(item, known), max_size=2)
        case inspect.TupleType(item_types=items):
            return st.tuples(*(_of(item, known) for item in items))
        case inspect.NamedTupleType(cls=cls, fields=fields):
            return st.builds(cls, *(_of(field.type, known) for field in fields))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key, known), _of(value, known), max_size=2)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.RawType():
            return st.just(msgspec.Raw(b"\xc0"))
    raise TypeError(f"no values for {info}")


def _made(cls: type, fields: dict[str, Strategy]) -> Strategy:
    @st.composite
    def make(draw: st.DrawFn) -> Any:
        values = {name: draw(strategy) for name, strategy in fields.items()}
        try:
            return cls(**values)
        except ValueError:  # fields that contradict each other
            return draw(st.nothing())

    return make()


def _is_within(x: float, gt: float | None, ge: float | None, le: float | None) -> bool:
    if gt is None and ge is None and le is None:
        return True
    return (gt is None or x > gt) and (ge is None or x >= ge) and (le is None or x <= le)
