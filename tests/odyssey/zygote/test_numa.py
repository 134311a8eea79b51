"""Ranks near their GPUs: torch is asked which processors those are."""

from __future__ import annotations

import os

import pytest
from torch.numa import binding

from odyssey.zygote import numa


def test_torch_is_asked_for_processors_in_the_words_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    node_of = next(name for name in dir(binding) if name.startswith("_get_numa_node_index_for_"))
    monkeypatch.setattr(binding, node_of, lambda **_: 0)
    assert numa._processors("node", 0) <= os.sched_getaffinity(0)

    def newer(*, device_index: int, numa_options: object) -> set[int]:
        return {device_index + 10}

    def older(*, gpu_index: int, numa_options: object) -> set[int]:
        return {gpu_index + 20}

    for find, found in ((newer, 13), (older, 23)):
        monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", find)
        assert numa._processors("node", 3) == {found}
