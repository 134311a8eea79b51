"""The recipes of docs/frameworks.md: models of Lightning, Accelerate and Transformers by `odyssey.resilient`, and a Trainer of
one's own. What a rank that is killed leaves is what plain torch makes of the same model in one process."""

from __future__ import annotations

import difflib
import importlib
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

from launcher.joblog.events import GenerationStarted, JobEnded, RankLost, Restarting
from launcher.options import OnLoss, RunOptions
from tests import ROOT, plain_loop
from tests.agent_runs import Ran, nothing_left
from tests.jobs.in_double import causal_loss
from tests.reference import step_sample_ids

__all__ = ["nothing_left"]
FOLDER = ROOT / "examples" / "frameworks"
RECIPES = {
    "lightning_resilient": "lightning_trainer",
    "accelerate_resilient": "accelerate_loop",
    "transformers_resilient": "transformers_trainer",
    "own_resilient": "own_trainer",
}
"""Ours -> what it was made of."""
PACKAGES = {"lightning_resilient": "lightning", "accelerate_resilient": "accelerate", "transformers_resilient": "transformers"}
N_RANKS = 4


def difference(recipe: str) -> list[str]:
    """Lines that went and that are new, below the docstring, with `@@` between places."""
    before, after = ((FOLDER / f"{name}.py").read_text().splitlines()[1:] for name in (RECIPES[recipe], recipe))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[3:]
    return ["@@" if line.startswith("@@") else line for line in lines]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_at_most_fifteen_new_lines_and_the_page_shows_them(recipe: str) -> None:
    found = difference(recipe)
    assert 0 < sum(line.startswith("+") for line in found) <= 15
    page = (ROOT / "docs" / "frameworks.md").read_text()
    assert "\n".join(["```diff", *found, "```"]) in page


class Recipe:
    """A recipe's model in plain torch, what it is trained with, and what the recipe has written at its end."""

    n_steps: int
    global_batch, micro_batch = 32, 8
    clip_norm: float | None = None
    scheduler: Any = None
    collate: Callable[[list[Any]], Any] = staticmethod(default_collate)

    def __init__(self, name: str) -> None:
        self.module: Any = importlib.import_module(f"examples.frameworks.{name}")
        torch.manual_seed(0)
        getattr(self, name.removesuffix("_resilient"))()

    def train(self) -> list[float]:
        """Losses of all steps on all samples."""
        given = {"n_steps": self.n_steps, "global_batch": self.global_batch, "micro_batch": self.micro_batch}
        given |= {"scheduler": self.scheduler, "clip_norm": self.clip_norm, "collate": self.collate}
        return plain_loop.train(self.model, self.optimizer, self.loss, self.data, **given)

    def train_on(self, steps: Iterable[Iterable[tuple[Tensor, Any, float]]]) -> None:
        plain_loop.train_on(steps, self.model, self.optimizer, self.loss, self.scheduler, self.clip_norm)

    def lightning(self) -> None:
        self.model, self.data = self.module.Classifier(), self.module.make_data()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 48)
        self.n_steps, self.clip_norm = 48, 1.0
        self.loss = lambda batch: nn.functional.cross_entropy(self.model.net(batch[0]), batch[1])
        self.written = lambda: torch.load("module.pt")

    def accelerate(self) -> None:
        self.model, self.data, self.collate = self.module.build_model(), self.module.Texts(480), self.module.pad
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(step / 4, (45 - step) / 41))
        self.n_steps = 45

        def loss(batch: dict[str, Tensor]) -> Tensor:
            logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            return nn.functional.cross_entropy(logits, batch["labels"])

        self.loss = loss
        self.unseen = self.module.Texts(96, first=1_000_000)
        self.written = lambda: torch.load("model.pt")

    def transformers(self) -> None:
        from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling

        self.model, self.data = self.module.build_model(), self.module.make_data()
        self.collate = DataCollatorForLanguageModeling(self.module.tokenizer, mlm=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(step / 4, (40 - step) / 36))
        self.n_steps, self.global_batch, self.micro_batch, self.clip_norm = 40, 16, 4, 1.0

        def loss(batch: Any) -> Tensor:
            return causal_loss(self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"])

        self.loss = loss
        self.written = lambda: AutoModelForCausalLM.from_pretrained("model").state_dict()

    def own(self) -> None:
        self.model, self.data = self.module.build_model(), self.module.make_data()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.n_steps = 60
        self.loss = lambda batch: nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def written() -> dict[str, Tensor]:
            """What the checkpoint behind the last step goes on from."""
            import odyssey

            model = self.module.build_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
            given = {"global_batch": 32, "micro_batch": 8, "resume": "snapshots"}
            run = odyssey.resilient(model, optimizer, lambda batch: model(batch[0]).sum(), self.data, **given)
            assert run.next_step == 60
            return model.state_dict()

        self.written = written


def ran(folder: Path, script: str, *lose: str) -> Ran:
    given = (*lose, str(FOLDER / f"{script}.py"))
    job = str(ROOT / "tests" / "jobs" / "in_double.py")
    return Ran(RunOptions(job, given, n_ranks_per_node=N_RANKS, log_dir=folder / "logs", capture_output=True))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("victim", [0, 2])
def test_what_a_recipe_trains_is_what_one_process_trains_whoever_is_killed(
    recipe: str, victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip(PACKAGES.get(recipe, "torch"))
    request.getfixturevalue("nothing_left")  # now that it is imported
    monkeypatch.chdir(tmp_path)
    found = ran(tmp_path, recipe, "--lose", str(victim), "20", f"{random.random() * 20:.1f}")
    assert found.code == 0, (found.all(JobEnded), found.text("stderr"))
    found.assert_replays()
    assert [lost.rank for lost in found.all(RankLost)] == [victim]
    assert len(found.all(GenerationStarted)) == 2
    with plain_loop.in_double():
        expected = Recipe(recipe)
        expected_losses = expected.train()
        assert plain_loop.largest_difference(expected.model, expected.written()) < 1e-10
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", found.text(), re.MULTILINE)}
    assert list(losses) and losses == pytest.approx(dict(enumerate(expected_losses)), abs=1e-4)
    if hasattr(expected, "unseen"):
        with plain_loop.in_double():
            validation = plain_loop.validation_loss(expected.model, expected.loss, expected.unseen, 8, expected.collate)
        assert float(found.text().rpartition("validation loss ")[2]) == pytest.approx(validation, abs=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_was_made_of_goes_on_unchanged_with_fewer_ranks(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for Transformers' Trainer: it averages over what Accelerate gathers, which keeps the number of ranks."""
    pytest.importorskip(PACKAGES.get(recipe, "torch"))
    monkeypatch.chdir(tmp_path)
    found = Ran(
        RunOptions(
            str(ROOT / "tests" / "jobs" / "lost_at_step.py"),
            ("2", "15", str(FOLDER / f"{RECIPES[recipe]}.py")),
            n_ranks_per_node=N_RANKS,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
            max_restarts=1,
        )
    )
    assert found.code == 0, (found.all(JobEnded), found.text("stderr"))
    assert found.all(RankLost)[0].rank == 2
    if recipe == "transformers_resilient":
        (restarting,) = found.all(Restarting)
        whys = ("a collective has places for 4 ranks, and there are 3", "what is gathered while it trains is of other ranks")
        assert any(why in restarting.failure for why in whys), "it gathers behind the loss, or had gathered before"
    else:
        assert len(found.all(RankLost)) == 1 and not found.all(Restarting)
        assert len(found.all(GenerationStarted)) == 2
    assert any((tmp_path / name).exists() for name in ("module.pt", "model.pt", "model", "snapshots"))


@pytest.mark.soak
def test_a_module_of_lightning_does_without_a_trainer_what_the_page_says() -> None:
    pytest.importorskip("lightning")
    from examples.frameworks import lightning_resilient

    module = lightning_resilient.Classifier()
    with pytest.warns(UserWarning, match="self.trainer` reference is not registered"):
        loss = module.training_step(lightning_resilient.make_data()[:8], 0)
    assert loss.requires_grad
    assert (module.current_epoch, module.global_step) == (0, 0)
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        module.optimizers()


@pytest.mark.soak
@pytest.mark.parametrize("micro_batch", [2, 3])
def test_tokens_count_alike_where_the_script_says_how_many_there_are(micro_batch: int) -> None:
    """The page has it so, whatever the micro-batch. Transformers computes losses in float32."""
    pytest.importorskip("transformers")
    from transformers import DataCollatorForLanguageModeling

    import odyssey
    from examples.frameworks import transformers_resilient

    data = transformers_resilient.make_data()
    collate = DataCollatorForLanguageModeling(transformers_resilient.tokenizer, mlm=False)
    torch.manual_seed(0)
    model = transformers_resilient.build_model().eval()
    started = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def loss(batch: Any) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    def weight(batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sizes = {"global_batch": 12, "micro_batch": micro_batch}
    run = odyssey.resilient(model, optimizer, loss, data, **sizes, collate=collate, weight=weight)
    found = next(run.steps(1)).loss
    changes = {name: started[name] - parameter.detach() for name, parameter in model.named_parameters()}

    model.load_state_dict(started, strict=False)
    model.zero_grad()
    total, n = torch.zeros(()), 0
    for i in step_sample_ids(0, 12, len(data), 0):
        ids = torch.tensor([data[i]["input_ids"]])
        total = total + nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        n += len(ids[0]) - 1
    (total / n).backward()
    assert found == pytest.approx(total.item() / n, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(changes[name], parameter.grad, rtol=1e-3, atol=1e-6)
