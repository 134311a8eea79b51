"""What torchrun has only from some torch on, and what ranks find of a newer torch: as under the torchrun of that torch."""

from __future__ import annotations

import socket

import pytest

from odyssey_cli.command_line.torch_version import installed
from tests.launchers import OURS, PROBE, Launcher, Scene, free_port, scene, under_both

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)
from_2_15 = pytest.mark.skipif(installed() < (2, 15), reason="torchrun has it from torch 2.15 on")

SPEAK = "import os\nprint('rank', os.environ['RANK'], 'speaks')\n"


@from_2_15
@under_both
def test_the_prefix_of_lines_is_an_option_and_wins_over_the_older_variable(scene: Scene, launcher: Launcher) -> None:
    older = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "older "}
    template = "${hostname}:${role_name}:${rank}:${local_rank}:${unknown} "
    arguments = ["--nproc-per-node=2", "--tee=3", "--log-dir=logs", scene.write("speak.py", SPEAK)]
    by_option = scene.start(launcher, "--log-line-prefix-template", template, *arguments, env=older).succeed()
    said = [f"{socket.gethostname()}:default:{rank}:{rank}:${{unknown}} rank {rank} speaks" for rank in (0, 1)]
    assert sorted(by_option.stdout.splitlines()) == said
    by_variable = scene.start(launcher, *arguments, env=older | {"PET_LOG_LINE_PREFIX_TEMPLATE": "newer "}).succeed()
    assert sorted(by_variable.stdout.splitlines()) == ["newer rank 0 speaks", "newer rank 1 speaks"]


def test_the_host_is_named_in_the_older_variable_too(scene: Scene) -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${hostname}: "}
    run = scene.start(OURS, "--tee=3", scene.write("speak.py", SPEAK), env=env).succeed()
    assert run.stdout == f"{socket.gethostname()}: rank 0 speaks\n"


@from_2_15
@under_both
@pytest.mark.parametrize("hip", ["5, 7", ""])
def test_a_virtual_local_rank_is_a_device_of_rocm_too(scene: Scene, launcher: Launcher, hip: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": hip}
    scene.start(launcher, "--virtual-local-rank", "--nproc-per-node=2", PROBE, env=env).succeed()
    for rank, device in enumerate(("5", "7") if hip else ("1", "2")):
        found = scene.probe(rank).env
        assert (found["CUDA_VISIBLE_DEVICES"], found["HIP_VISIBLE_DEVICES"]) == (device, device if hip else "")


@from_2_15
@under_both
def test_a_script_may_meet_at_a_place_of_its_own(scene: Scene, launcher: Launcher) -> None:
    """TORCHELASTIC_USE_AGENT_STORE is said of MASTER_ADDR and MASTER_PORT alone: elsewhere rank 0 hosts."""
    text = f"""
import os
import torch, torch.distributed
rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:{free_port()}", rank=rank, world_size=n)
total = torch.ones(1)
torch.distributed.all_reduce(total)
torch.distributed.destroy_process_group()
os.write(1, b"%d\\n" % total.item())
"""
    run = scene.start(launcher, "--nproc-per-node=2", scene.write("train.py", text)).succeed()
    assert run.stdout == "2\n2\n"
