"""Numbers that ranks have alike, found out by a sum."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from odyssey.runtime.agreed_numbers import N_RATE, alike, rate_of, rates_told, told, untold

NUMBERS = st.lists(st.integers(0, (1 << 16) - 1), min_size=1, max_size=5)


def summed(each: Sequence[Sequence[float]]) -> list[float]:
    """A reduction in double precision adds up so."""
    return [sum(column) for column in zip(*each, strict=True)]


@given(NUMBERS, st.integers(1, 1 << 14), st.integers(0, 3))
def test_those_who_have_none_learn_what_the_others_have(numbers: list[int], n: int, n_without: int) -> None:
    sums = [n * one for one in told(numbers)]
    assert alike(summed([sums, *[untold(len(numbers))] * n_without])) == tuple(numbers)


@given(st.data(), NUMBERS)
def test_numbers_that_differ_are_told_from_all_others(data: st.DataObject, numbers: list[int]) -> None:
    others = st.lists(st.integers(0, (1 << 16) - 1), min_size=len(numbers), max_size=len(numbers))
    each = data.draw(st.lists(st.one_of(st.just(numbers), others), min_size=1, max_size=6))
    assert alike(summed([told(one) for one in each])) == (tuple(each[0]) if each.count(each[0]) == len(each) else None)


def test_nobody_has_any() -> None:
    assert alike(summed([untold(2), untold(2)])) == ()
    assert rate_of(summed([rates_told([])] * 3)) is None


@given(st.lists(st.frozensets(st.floats(allow_nan=False), max_size=2), min_size=1, max_size=5))
def test_a_learning_rate_is_what_all_optimizers_of_all_ranks_have_to_the_last_bit(ranks: list[frozenset[float]]) -> None:
    bits = {struct.pack("<d", rate) for rates in ranks for rate in rates}
    each = [rates_told(rates) for rates in ranks]
    assert all(len(one) == N_RATE for one in each)
    found = rate_of(summed(each))
    assert (None if found is None else struct.pack("<d", found)) == (bits.pop() if len(bits) == 1 else None)
    assert found is None or not math.isnan(found)
