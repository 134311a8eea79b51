"""Profiles by arithmetic: the models and clusters of configs/, against published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from odyssey.errors import ProfileError
from odyssey_cli.planning.source import find
from perfmodel.profile.catalog import load, load_job, names
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import has_input_gradient
from tests.planning import first_plan, profile

CONFIGS = Path(configs.__file__).parent


@pytest.mark.parametrize("name", names()["jobs"])
def test_every_job_in_configs_loads_and_its_layout_fits(name: str) -> None:
    job = load_job(name)
    assert load(name) == (job.profile, job.layout) and job.name == name
    first_plan(job.profile, job.layout, job.n_ranks)


def test_a_model_and_a_cluster_make_a_job() -> None:
    assert load_job("gpt3-medium@a100-32").n_ranks == 32


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="no job is called 'gpt5'") as caught:
        load("gpt5")
    assert "gpt3-medium-a100-32" in caught.value.help
    with pytest.raises(ProfileError, match="no cluster is called 'moon'"):
        load("gpt3-medium@moon")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "model: gpt-tiny\ncluster: two-cores\nlayout: 2x2\nglobal_batch: 0\nmicro_batch: 1\n",
            "global_batch: expected `int` >= 1",
        ),
        ("model: gpt-tiny\ncluster: two-cores\nlayout: 2x2\nglobal_batch: 8\n", "missing required field `micro_batch`"),
        ("model: gpt-tiny\ncolour: red\n", "unknown field `colour`"),
        ("model: [\n", "not YAML"),
    ],
)
def test_an_error_in_a_file_names_file_and_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load(path)
    assert says in caught.value.what and "job.yaml" in caught.value.what and caught.value.help


@pytest.mark.parametrize(
    ("name", "cluster", "billions"),
    [
        ("gpt3-medium", "a100-32", 0.35),
        ("gpt3-2.7b", "a100-32", 2.65),
        ("gpt3-3.35b", "a100-32", 3.35),
        ("gpt3-6.7b", "a100-32", 6.7),
        ("bert-large", "a40-30", 0.34),
        ("gpt2", "a100-32", 0.1244),
        ("gpt2-xl", "a100-32", 1.558),
        ("llama2-7b", "h100-64", 6.738),
        ("llama2-13b", "h100-64", 13.016),
        ("llama-65b", "h100-64", 65.286),
    ],
)
def test_models_have_the_parameters_that_were_published(name: str, cluster: str, billions: float) -> None:
    """GPT-3's count has one matrix for embedding and head, as GPT-2's; so here without the head."""
    of = load_job(f"{name}@{cluster}").profile
    layers = of.layers[:-1] if name.startswith("gpt3") else of.layers
    n_bytes = sum(layer.parameter_bytes for layer in layers) + sum(of.tie_bytes)
    assert n_bytes / 2 / 1e9 == pytest.approx(billions, rel=0.03 if name.startswith(("gpt3", "bert")) else 0.002)


def test_a_block_takes_its_arithmetic_at_the_stated_efficiency() -> None:
    block = load_job("gpt3-6.7b@a100-32").profile.layers[5]
    flops = 24 * 2048 * 4096**2 + 4 * 2048**2 * 4096
    assert block.forward_s == pytest.approx(flops / (312e12 * 0.45))
    assert block.backward_s == pytest.approx(2 * block.forward_s)
    gated = load_job("llama2-7b@a100-32").profile.layers[5]
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    assert gated.forward_s == pytest.approx((2 * 4096 * matrices + 4 * 4096**2 * 4096) / (312e12 * 0.45))


def test_tokens_have_no_gradient() -> None:
    assert not has_input_gradient(load("gpt3-6.7b-a100-32")[0])


def _with(tmp_path: Path, **options: str) -> Profile:
    """GPT-3 2.7B on A100, a micro-batch of two, with these options of a job file."""
    lines = ["model: gpt3-2.7b", "cluster: a100-32", "layout: auto", "global_batch: 8", "micro_batch: 2"]
    path = tmp_path / "job.yaml"
    path.write_text("\n".join([*lines, *(f"{name}: {value}" for name, value in options.items())]))
    return load(path)[0]


def test_checkpointing_trades_bytes_that_are_kept_for_a_second_forward(tmp_path: Path) -> None:
    """Korthikanti et al., table 2, for s = 2048, b = 2, h = 2560, a = 32."""
    sbh = 2048 * 2 * 2560
    by = {kept: _with(tmp_path, checkpointing=kept) for kept in ("none", "selective", "full")}
    blocks = {kept: of.layers[3] for kept, of in by.items()}
    assert blocks["none"].activation_bytes == round(sbh * (34 + 5 * 32 * 2048 / 2560))
    assert blocks["selective"].activation_bytes == 34 * sbh
    assert blocks["full"].activation_bytes == 2 * sbh
    assert blocks["full"].backward_s == pytest.approx(blocks["none"].backward_s + blocks["none"].forward_s)
    assert by["full"].runtime_bytes == by["none"].runtime_bytes + 34 * sbh  # of the block that is computed again


def test_precision_says_what_a_parameter_takes_and_how_fast_a_device_is(tmp_path: Path) -> None:
    half, single = _with(tmp_path), _with(tmp_path, precision="fp32")
    for of, n_bytes in ((half, (2, 2, 12)), (single, (4, 4, 8))):
        layer = of.layers[3]
        n_parameters = layer.parameter_bytes // n_bytes[0]
        assert (layer.gradient_bytes, layer.optimizer_bytes) == (n_bytes[1] * n_parameters, n_bytes[2] * n_parameters)
    assert single.layers[3].output_bytes == 2 * half.layers[3].output_bytes
    assert single.layers[3].forward_s == pytest.approx(half.layers[3].forward_s * 312 / 19.5)


def test_what_is_modelled_says_so(tmp_path: Path) -> None:
    assert load("gpt3-6.7b-a100-32")[0].is_modelled and not profile(2, 1).is_modelled
    assert find("gpt3-6.7b-a100-32").title == "gpt3-6.7b-a100-32, modelled"


def test_a_model_and_a_cluster_that_do_not_go_together_are_an_error() -> None:
    with pytest.raises(ProfileError, match="cluster v100-32: flops: none for bf16") as caught:
        load("llama2-7b@v100-32")
    assert "fp16, fp32" in caught.value.help


@pytest.mark.parametrize("cluster", names()["clusters"])
def test_every_constant_of_a_cluster_says_where_it_is_from(cluster: str) -> None:
    """Sizes that are the cluster's name or said in the first line need no more."""
    head, *lines = (CONFIGS / "clusters" / f"{cluster}.yaml").read_text().splitlines()
    assert head.startswith("# ")
    said = ("name:", "n_ranks:", "ranks_per_node:", "nodes_per_host:", "cores:")
    unsaid = [line for line in lines if not line.startswith(said) and not line.partition("#")[2].strip()]
    assert [line for line in unsaid if not (line.startswith("memory_gb:") and f"{line.split()[1]} GB" in head)] == []


@pytest.mark.parametrize("path", sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("models/*.yaml")]), ids=lambda path: path.stem)
def test_every_model_and_job_begins_with_where_it_is_from(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_optimizer_state_that_is_divided_among_ranks_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="unknown field `zero`") as caught:
        _with(tmp_path, zero="1")
    assert "each holder of a layer keeps all of its optimizer state" in caught.value.help


def test_scores_that_are_kept_need_the_number_of_heads(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: gpt3-6.7b\ncluster: a100-32\nlayout: auto\nglobal_batch: 8\nmicro_batch: 1\ncheckpointing: none\n")
    with pytest.raises(ProfileError, match="checkpointing none: heads is missing"):
        load(path)
