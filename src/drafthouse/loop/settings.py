"""The run file: every setting of the loop in one typed tree, one section a room."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from drafthouse.config import Settings
from drafthouse.corpus import CorpusSettings
from drafthouse.decode.evaluate import EvaluateSettings
from drafthouse.drafter.config import DrafterShape
from drafthouse.drafter.losses import LossSettings
from drafthouse.drafter.trainer import TrainSettings
from drafthouse.loop.tiny import TargetSettings
from drafthouse.states.settings import ExtractSettings

DEMO_RUN_FILE = Path(str(files("drafthouse.loop") / "demo.yml"))
# What reports compare with: DFlash's own recipe (arXiv 2602.06036).
HARD_DECAY = LossSettings(soft_weight=0.0, weights="decay")

# A recipe's name is a folder, a part of file names and of the path of a key.
RecipeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class AnswerSettings(Settings):
    """Answers of the target to the prompts of the corpus: what the drafter learns to foresee."""

    rows: int = Field(128, ge=1, description="prompts answered side by side")
    max_new_tokens: int = Field(96, ge=1, description="tokens after which an answer is cut")
    temperature: float = Field(0.0, ge=0.0, description="0 = greedy, as it will be served")
    seed: int = Field(0, ge=0, description="of the sampling")


class ProbeSettings(Settings):
    """Held-out acceptance during training: a few prompts that the final evaluation does not use."""

    prompts: int = Field(4, ge=0, description="of every kind; 0 = none")
    seed: int = Field(1, ge=0, description="of the prompts; differs from that of the final evaluation")


class RunSettings(Settings):
    """Root of a run file."""

    name: str = Field("demo", pattern=r"^[a-z0-9][a-z0-9._-]*$", description="of the run, as reports show it")
    store: str | None = Field(None, description="object store (file:, s3:); none: `store` in the run folder")
    threads: int = Field(
        1, ge=1, description="CPU threads of one process; small models run faster as several processes of one"
    )
    target: TargetSettings = Field(default_factory=TargetSettings)
    corpus: CorpusSettings = Field(default_factory=CorpusSettings, description="prompts of the drafter's corpus")
    answers: AnswerSettings = Field(default_factory=AnswerSettings)
    extract: ExtractSettings = Field(default_factory=ExtractSettings)
    workers: int = Field(2, ge=1, description="extraction workers that the demo starts")
    drafter: DrafterShape = Field(default_factory=DrafterShape)
    train: dict[RecipeName, TrainSettings] = Field(
        default_factory=lambda: {"baseline": TrainSettings(loss=HARD_DECAY), "ours": TrainSettings()},
        description="one drafter for each named recipe; reports compare 'baseline' and 'ours'",
    )
    probe: ProbeSettings = Field(default_factory=ProbeSettings)
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)

    @model_validator(mode="after")
    def _check(self) -> RunSettings:
        missing = {"baseline", "ours"} - set(self.train)
        if missing:
            raise ValueError(f"train lacks the recipe '{min(missing)}', which reports compare")
        spine = self.drafter.block_size - 1
        if self.evaluate.budget < spine:
            raise ValueError(
                f"evaluate.budget {self.evaluate.budget} cannot hold the spine of drafter.block_size"
                f" {self.drafter.block_size}; use at least {spine}"
            )
        wanted = self.extract.layer_ids
        if wanted and set(wanted) != set(self.drafter.target_layer_ids):
            raise ValueError(
                f"extract.layer_ids {list(wanted)} are not the drafter.target_layer_ids"
                f" {list(self.drafter.target_layer_ids)}; leave extract.layer_ids out"
            )
        if self.corpus.max_tokens + self.answers.max_new_tokens > self.extract.max_tokens:
            raise ValueError(
                f"extract.max_tokens {self.extract.max_tokens} would cut answers: corpus.max_tokens and"
                f" answers.max_new_tokens make up to {self.corpus.max_tokens + self.answers.max_new_tokens}"
            )
        return self
