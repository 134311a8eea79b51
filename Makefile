# The first `make` of anything sets up .venv; after that it is quick.
#
#   make demo      train on 4 ranks, lose one on purpose, compare with the undisturbed loss (about a minute)
#   make test      everything but the long tests
#   make soak      the long tests, a thousand random faults among them (three hours; again: goes on where it stopped, on the same code)
#   make lint      ruff and mypy
#   make bench     the benchmarks, written to docs/internals/benchmarks.md (4 hours on two cores; again: goes on where it stopped)
#   make picture   draw docs/picture.svg and docs/timeline.svg from rehearsed jobs, docs/change.svg, docs/loss.svg, docs/strategies.md
#   make gpu-test  the tests that need a GPU
#   make slurm-test  those with a real SLURM, which it installs where it can (Debian, root)

PYTHON ?= python3
# Named in this one place. PyPI's builds for Linux bring CUDA along; with PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL they do not.
TORCH ?= torch==2.13.0

BIN := .venv/bin
READY := .venv/.ready
# `exec`, so that it is the child of `make` itself and no shell's: it ends with `make`, whatever ends that.
TESTS := $(BIN)/python -m pytest --ends-with-parent
CLIENTS := .venv/.clients
SOLVER := .venv/.solver
TORCHFT := .venv/.torchft

.PHONY: help demo test soak lint format bench picture gpu-test slurm-test
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: $(READY)
	exec $(TESTS) --limit 3600 -n 3 --dist worksteal $(ARGS)

# `=`: pytest looks for conftest.py beside what it takes for a path.
soak: $(READY) $(CLIENTS)
	exec $(TESTS) --limit 14400 -m "soak or hypothesis" --cold --hypothesis-profile random --timeout 1800 --go-on=benchmarks/results/soak-passed.txt $(ARGS)

gpu-test: $(READY)
	exec $(TESTS) --limit 3600 -m gpu $(ARGS)

# Where it cannot be installed the tests are skipped, and say why.
slurm-test: $(READY)
	-@timeout 300 tests/slurm/slurm.sh install
	exec $(TESTS) --limit 3600 -m slurm -rs -n 0 --timeout 300 tests/slurm $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) $(SOLVER) $(TORCHFT)
	exec $(BIN)/python -m benchmarks --ends-with-parent

picture: $(READY)
	$(BIN)/odyssey rehearse gpt3-medium-a100-32 --layout 4x8 --drill 'step=8 lose=13' --steps 24 --no-display \
		--log-dir build/picture
	$(BIN)/python -m odyssey_cli.jobs.picture build/picture --output docs/picture.svg
	rm -rf build/timeline
	$(BIN)/odyssey rehearse gpt3-3.35b-a100-32-batch-128 --strategy reroute --drill 'step=4 lose=10' --steps 8 --speed 0.25 \
		--no-display --log-dir build/timeline
	$(BIN)/odyssey timeline build/timeline/*/ --no-prediction --svg docs/timeline.svg
	$(BIN)/odyssey plan gpt3-medium-a100-32 --layout 4x8 --fail-ranks 6 --strategy reroute --change docs/change.svg
	$(BIN)/python -m odyssey_cli.planning.strategies_page docs
	$(BIN)/python -m benchmarks.loss_picture docs/loss.svg

# One `make` installs, another waits for it: two at once would break each other's. What was interrupted is made anew.
$(READY): pyproject.toml setup.py odyssey/kernel/plain.py
	@flock $< sh -exc '[ -e $@ ] && [ -z "$$(find $^ -newer $@)" ] && exit; \
		test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv; \
		$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[dev]"; \
		touch $@'

# What users run under a launcher: the soak launches it, nothing of ours imports it.
$(CLIENTS): $(READY)
	@flock pyproject.toml $(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[clients]"
	@touch $@

# For the benchmark that holds our schedules against a constraint solver.
$(SOLVER): $(READY)
	@flock pyproject.toml $(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[benchmarks]"
	@touch $@

# A peer of `benchmarks.job_wall`, which leaves it out where it cannot be installed.
$(TORCHFT): $(READY)
	-@flock pyproject.toml $(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[torchft]"
	@touch $@
