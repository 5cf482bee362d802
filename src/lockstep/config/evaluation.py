"""What `lockstep eval` takes."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config.execution import Execution

# not what writes, and not the size of a chunk: other shapes would round otherwise than the run did
_NOT_EVALUATIONS = ("out", "cache", "log", "log_every", "eval_every", "eval_batch_size", "model_parallel", "duplicates")


@dataclass(frozen=True)
class Evaluation:
    """What `lockstep eval` takes beside the run folder."""

    weights: Literal["best", "final"] = "best"
    """Which of the run's saved weights."""
    data: Annotated[str, arg(help_behavior_hint="(default: the run's)")] = ""
    """Other labelled pictures: a folder, a table, or what --dataset takes; classes are matched by their names."""
    follow_links: bool = False
    """Follow links that lead out of that folder, or the table's."""
    report: Annotated[str, arg(help_behavior_hint="(default: none)")] = ""
    """Scores by class as a file: .csv (precision, recall, F1), .json (and the confusion matrix), .png (its picture)."""
    trust_code: bool = False
    """Import and call the code that the folder's config.json names, as --model package.module:factory did."""
    execution: Execution = field(default_factory=Execution, metadata={"hidden": _NOT_EVALUATIONS})
    """Where the evaluation goes."""
