"""How numbers are written for people: the same everywhere."""

from __future__ import annotations


def seconds(value: float) -> str:
    """`0 ms`, `0.02 ms`, `0.4 ms`, `12 ms`, `1.24 s`, `75 s`, `6 min`, `5.0 h`."""
    if value <= 0:
        return "0 ms"
    if value < 0.000095:
        return f"{value * 1e3:.2f} ms"
    if value < 0.0095:
        return f"{value * 1e3:.1f} ms"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 3600:
        return f"{value / 60:.0f} min"
    if value < 48 * 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 86400:.1f} d"


def clock(value: float) -> str:
    """Elapsed time: `0:07`, `12:34`, `1:02:03`."""
    minutes, whole = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def size(value: float) -> str:
    """Bytes in powers of 1024: `512 B`, `3.1 MiB`, `139 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def rate(value: float) -> str:
    """Per second: `3.41`, `87.2`, `1,240`."""
    return f"{value:,.{_rate_digits(value)}f}"


def rate_within(value: float, spread: float, *, ascii_only: bool = False) -> str:
    """A rate and how far off it may be, `spread` of it: `3.41 ±0.20`, `87.2 ±5.2`, `1,240 ±74`."""
    return f"{rate(value)} {'+-' if ascii_only else '±'}{value * spread:,.{_rate_digits(value)}f}"


def _rate_digits(value: float) -> int:
    """Behind the point."""
    return 2 if value < 9.995 else 1 if value < 99.95 else 0


def percent(value: float) -> str:
    """A fraction as `83 %`."""
    return f"{value * 100:.0f} %"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """`1 step`, `2 steps`; `nouns` where an s is not enough."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def there_are(number: int, noun: str) -> str:
    """`there is 1 rank`, `there are 2 ranks`."""
    return f"there {'is' if number == 1 else 'are'} {plural(number, noun)}"


def layers(first: int, stop: int) -> str:
    """Layers `[first, stop)` as people count: `4-7`, or `4` for a single one."""
    return f"{first}" if stop == first + 1 else f"{first}-{stop - 1}"
