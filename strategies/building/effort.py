"""How thoroughly plans are looked for, by the number of workers, and which gain is worth a plan that is less simple."""

FEW_WORKERS = 10
"""Up to so many every partition is tried, and each layout in many places: a search still takes a fraction of a second."""
MANY_WORKERS = 256
"""For more, what grows faster than the number of workers is left out."""
WORTH = 0.99
"""What asks for more memory, more hosts, smaller micro-batches or other splits is taken only for less than this part of the
time: prices are not nearer to the truth than that."""


def n_made_into_others(n_workers: int) -> int:
    """So many plans of each strategy, the best ones, are made into others: cut, or with layers that are kept."""
    return 3 if n_workers <= MANY_WORKERS else 1
