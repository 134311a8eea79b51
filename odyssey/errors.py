"""The tree of errors that users see.

OdysseyError            root: what is wrong and where, and a help line that says what to do
├── UsageError          flags and arguments of a command
├── PlanError           a Plan that contradicts itself or the state of the ranks
├── ProfileError        a profile that cannot be read or does not belong to the model
├── JobError            what a training script passes to `odyssey.Job`
│   ├── OptimizerError  its optimizer() makes none, or one of other parameters than it was given
│   ├── SchedulerError  its scheduler() makes none, or one of another optimizer
│   ├── AutocastError   a type that a Job cannot compute in
│   └── NonFiniteLoss   the loss became NaN or infinite
└── StateLost           layers whose last holder is gone
"""

from __future__ import annotations


class OdysseyError(Exception):
    """An error that is explained to the user: `what` is lower case without full stop, `help` the way out."""

    def __init__(self, what: str, help: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.help = help

    def __str__(self) -> str:
        return f"{self.what}\nhelp: {self.help}" if self.help else self.what


class UsageError(OdysseyError):
    """A command line, environment variable or option value that cannot be meant."""


class PlanError(OdysseyError):
    """A Plan that contradicts itself: names the pipeline, stage and micro-batch."""


class ProfileError(OdysseyError):
    """A profile that cannot be read, or that was measured on another model."""


class JobError(OdysseyError):
    """What a training script handed to `odyssey.Job` cannot be trained."""


class OptimizerError(JobError):
    """What `optimizer()` returned would not train just the parameters that it was given."""


class SchedulerError(JobError):
    """What `scheduler()` returned would not set the learning rate of the optimizer that it was given."""


class AutocastError(JobError):
    """`autocast` is a type that a Job cannot compute in."""


class NonFiniteLoss(JobError):
    """The loss of a step is NaN or infinite. The step is not applied."""


class StateLost(OdysseyError):
    """Every holder of some layer is gone, and no copy of it exists."""
