"""Hugging Face's decoders cut into layers: logits and gradients to the last bit, and training as of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import odyssey
from launcher.joblog.events import PlanChosen, RankLost
from launcher.options import RunOptions
from odyssey.errors import JobError
from tests import ROOT, models, reference
from tests.agent_runs import Ran, nothing_left
from tests.jobs.hugging_face import GIVEN, N_STEPS, TOKENS, PaddedData, llama
from tests.jobs.train import make_optimizer

__all__ = ["nothing_left"]
transformers = pytest.importorskip("transformers", reason="`make soak` installs it")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
ROTARY = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
EXPERTS = ROTARY | {"dtype": torch.float32}
"""Their grouped matrix products take no float64."""
OLDER = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "ministral", "gemma", "gemma2", "gemma3_text", "phi3"), ROTARY),
    **dict.fromkeys(("phi", "olmo", "olmo2", "olmo3", "smollm3", "starcoder2", "cohere", "cohere2", "glm4"), ROTARY),
    **dict.fromkeys(("stablelm", "nemotron", "seed_oss", "exaone4", "arcee", "helium", "lfm2", "recurrent_gemma"), ROTARY),
    **dict.fromkeys(("hunyuan_v1_dense", "persimmon", "gpt_neox", "ernie4_5", "biogpt"), ROTARY),
    **dict.fromkeys(("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "qwen3_next"), EXPERTS),
    "granite": ROTARY | {"embedding_multiplier": 12.0, "logits_scaling": 3.0},
    "deepseek_v3": EXPERTS | LATENT | {"head_dim": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "topk_group": 1},
    "gpt2": OLDER,
    "gpt_bigcode": OLDER,
    "gptj": OLDER | {"rotary_dim": 4},
    "codegen": OLDER | {"rotary_dim": 4},
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 4, "n_heads": 4},
    "xglm": {"vocab_size": 64, "d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 64, "dtype": torch.float32},
    "falcon": SIZES,
    "mamba": SIZES,
}
QUICK = ("llama", "gemma3_text", "mixtral", "gpt2", "bloom", "mamba")
"""They differ most: rotary, factors on embeddings, experts, positions, biases by distance, no attention at all."""


def made(family: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    dtype = sizes.pop("dtype", torch.float64)
    config = transformers.CONFIG_MAPPING[family](**TOKENS, **sizes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    return model


def gradients(output: Tensor, mask: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    """By name, of a scalar of what is not padding."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights * mask.unsqueeze(-1)).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.soak) for family in FAMILIES)])
def test_logits_and_gradients_are_those_of_the_model(family: str) -> None:
    model = made(family, **FAMILIES[family])
    ids = torch.arange(36).reshape(3, 12) * 5 % 61 + 1
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    expected = model(**given, use_cache=False).logits
    of_model = gradients(expected, mask, model)

    layers = odyssey.layers_of(model)
    assert len(layers) == 6
    value: Any = given
    for layer in layers:
        value = layer(value)
    of_layers = gradients(value, mask, model)

    assert torch.equal(value, expected)
    assert sum(gradient is not None for gradient in of_model.values()) > 10
    for name, gradient in of_model.items():
        found = of_layers[name]
        assert (found is None) == (gradient is None), name
        assert found is None or gradient is None or torch.equal(found, gradient), name


def test_the_page_says_how_many_families_there_are() -> None:
    assert f"{len(FAMILIES)} families of Hugging Face's decoders" in (ROOT / "docs" / "status.md").read_text()


@pytest.mark.soak
def test_labels_in_the_input_make_the_models_own_loss_of_it() -> None:
    model = llama()
    ids = torch.arange(16).reshape(2, 8)
    given = {"input_ids": ids, "labels": ids}
    value: Any = given
    for layer in odyssey.layers_of(model):
        value = layer(value)
    assert torch.equal(value, model(**given).loss)


@pytest.mark.soak
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_activations_give_the_same_gradients(is_reentrant: bool) -> None:
    model = llama().train()
    ids = torch.arange(16).reshape(2, 8)
    expected = gradients(model(ids).logits, torch.ones_like(ids), model)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    n_calls = 0

    def count(*_: Any) -> None:
        nonlocal n_calls
        n_calls += 1

    layers = odyssey.layers_of(model)
    model.model.layers[1].mlp.register_forward_pre_hook(count)
    value: Any = ids
    for layer in layers:
        value = layer(value)
    found = gradients(value, torch.ones_like(ids), model)
    assert n_calls == 2, "once forward, and once again in the backward"
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items() if gradient is not None)


UNLIKE = {
    "gemma3n_text": r"Gemma3nForCausalLM has 3 lists of blocks: model\.layers, model\.altup",
    "gemma4_text": r"Gemma4ForCausalLM does not run when it is cut at model\.layers",
}


@pytest.mark.soak
@pytest.mark.parametrize("family", UNLIKE)
def test_a_decoder_whose_embeddings_come_back_in_its_blocks_is_refused(family: str) -> None:
    more = {"num_kv_shared_layers": 0} if family == "gemma3n_text" else {}
    with pytest.raises(JobError, match=UNLIKE[family]):
        odyssey.layers_of(made(family, **EXPERTS, **more))


class Logits(nn.Module):
    """The whole model as a single layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**given, use_cache=False).logits
        return logits


def trained_whole(build: Any, n_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    return reference.train(lambda: [Logits(build())], models.token_loss, make_optimizer, PaddedData(), steps=n_steps, **GIVEN)


def assert_is_of_whole(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names in layers are those in the model, with a number and `model` before them."""
    found = {f"layers.0.model.{name.partition('.model.')[2]}": tensor for name, tensor in state.items()}
    assert found.keys() == expected.keys()
    assert reference.largest_difference(expected, found) < 1e-10


def gpt2() -> nn.Module:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return made("gpt2", **OLDER | {"vocab_size": 17}, **no_dropout).train()


@pytest.mark.soak
@pytest.mark.parametrize("build", [llama, lambda: llama(tied=True), gpt2], ids=["llama", "tied", "gpt2"])
def test_training_equals_a_plain_loop_on_the_whole_model(build: Any) -> None:
    job = odyssey.Job(lambda: odyssey.layers_of(build()), models.token_loss, make_optimizer, PaddedData(), **GIVEN)
    losses = [step.loss for step in job.steps(4)]
    expected_losses, expected = trained_whole(build, 4)
    assert losses == pytest.approx(expected_losses, abs=1e-12)
    assert_is_of_whole(job.state_dict()["model"], expected)


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("nothing_left")
def test_a_pipeline_that_loses_a_rank_trains_the_same(tmp_path: Path) -> None:
    script, out = str(ROOT / "tests" / "jobs" / "hugging_face.py"), tmp_path / "out.pt"
    options = RunOptions(script, (str(out),), n_nodes=4, layout="2x2", log_dir=tmp_path / "logs", capture_output=True)
    options = replace(options, strategy="repartition", drills=("step=3 kill=2",))
    ran = Ran(options)
    assert ran.code == 0, ran.text("stderr")
    assert [lost.rank for lost in ran.all(RankLost)] == [2]
    assert ran.all(PlanChosen)[-1].plan.moves
    assert ran.steps() == list(range(N_STEPS))
    expected_losses, expected = trained_whole(llama, N_STEPS)
    written = torch.load(out)
    assert list(written["losses"].values()) == pytest.approx(expected_losses, abs=1e-10)
    assert_is_of_whole(written["state"]["model"], expected)
    ran.assert_replays()
