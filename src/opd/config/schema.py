"""The recipe: every option of a run, with its default, in one place.

Strategies are unions told apart by `name`. Units are in names (`_s`, `_bytes`, `_frac`), counts start with `num_`.
Rules that span several sections are in `check.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from opd.config.base import Config
from opd.config.loss import ForwardKLConfig, LossConfig

DType = Literal["float32", "bfloat16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Scalar = bool | int | float | str


# ---- student and teacher -------------------------------------------------------------------------------------------


class LoraConfig(Config):
    """Low-rank adapters through peft; the initial weights stay available as `adapter off`."""

    name: Literal["lora"] = "lora"
    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class FullConfig(Config):
    """Train every weight."""

    name: Literal["full"]


AdapterConfig = Annotated[LoraConfig | FullConfig, Field(discriminator="name")]


class ModelConfig(Config):
    """A model reference (hub id, local folder, `gguf:PATH`, `package:NAME`) and how to load it."""

    model: str = Field(min_length=1)
    revision: str | None = None
    dtype: DType = "bfloat16"
    attention: Attention = "sdpa"
    trust_remote_code: bool = False


class StudentConfig(ModelConfig):
    """The model that samples and learns."""

    adapter: AdapterConfig = LoraConfig()
    gradient_checkpointing: bool = False


class InitialWeights(Config):
    """The student's weights before training: adapter off, or a frozen copy when every weight trains."""

    name: Literal["initial"] = "initial"


class LiveWeights(Config):
    """The student's current weights."""

    name: Literal["live"]


class EmaWeights(Config):
    """A moving average of the student's trained weights, from the initial ones on: decay * ema + (1 - decay) * live."""

    name: Literal["ema"]
    decay: float = Field(default=0.99, gt=0, lt=1)


TeacherWeights = Annotated[InitialWeights | LiveWeights | EmaWeights, Field(discriminator="name")]


class SelfTeacherConfig(Config):
    """The student itself, shown the context (OPSD, arXiv 2601.18734)."""

    name: Literal["self"] = "self"
    weights: TeacherWeights = InitialWeights()


class ModelTeacherConfig(ModelConfig):
    """Another local model with the same vocabulary (GKD, arXiv 2306.13649)."""

    name: Literal["model"]


TeacherConfig = Annotated[SelfTeacherConfig | ModelTeacherConfig, Field(discriminator="name")]


# ---- prompts -------------------------------------------------------------------------------------------------------


class MessageTemplate(Config):
    """One chat message; `content` is a sandboxed Jinja2 template."""

    role: Literal["system", "user", "assistant"]
    content: str


class ContextConfig(Config):
    """What the teacher is shown and the student is not.

    - `reference_solution`: the problem's own solution
    - `answer_only`: its final answer
    - `demonstrations`: solved examples of other training problems alone
    - `placebo`: another problem's solution in place of the right one (what is left is format and tone)
    - `none`: nothing

    `num_demonstrations` solved examples may join the first four. `demonstration_choice: fixed` shows every problem the
    same ones (the part of the prompt that is the same for all is then run once a step); `per_problem` draws for each.
    """

    name: Literal["reference_solution", "answer_only", "demonstrations", "placebo", "none"] = "reference_solution"
    num_demonstrations: int = Field(default=0, ge=0)
    demonstration_choice: Literal["per_problem", "fixed"] = "per_problem"


class PromptConfig(Config):
    """Messages of student and teacher as templates over `problem`, `solution`, `answer`, `demonstrations`, `metadata`.

    `student: null` takes the row's own messages, or one user message that holds the problem. `teacher: null` is the
    student's messages with the context in a last paragraph of the last user message. `demonstration` renders one solved
    example as chat turns, placed after the teacher's system message.
    """

    student: tuple[MessageTemplate, ...] | None = None
    teacher: tuple[MessageTemplate, ...] | None = None
    demonstration: tuple[MessageTemplate, ...] | None = None
    student_thinking: bool | None = None
    teacher_thinking: bool | None = None
    max_student_prompt_tokens: int = Field(default=2048, ge=1)
    max_teacher_prompt_tokens: int = Field(default=8192, ge=1)
    on_long_prompt: Literal["error", "drop"] = "error"


# ---- data ----------------------------------------------------------------------------------------------------------


class ColumnsConfig(Config):
    """Which column holds what; null means the column of the same name if there is one."""

    problem: str | None = None
    solution: str | None = None
    answer: str | None = None
    messages: str | None = None
    id: str | None = None


class TaskSource(Config):
    """Generated problems: a built-in task or `reasoning_gym:NAME`; train and held-out never overlap."""

    name: Literal["task"]
    task: str
    split: Literal["train", "heldout"] = "train"
    num_problems: int | None = Field(default=None, ge=1)
    seed: int = 0
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])


class FileSource(Config):
    """A json, jsonl, csv or parquet file."""

    name: Literal["file"]
    path: Path
    columns: ColumnsConfig = ColumnsConfig()
    num_problems: int | None = Field(default=None, ge=1)


class HubSource(Config):
    """A data set by hub id, or a local folder of the same layout, through `datasets`."""

    name: Literal["hub"]
    dataset: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: ColumnsConfig = ColumnsConfig()
    num_problems: int | None = Field(default=None, ge=1)


Source = Annotated[TaskSource | FileSource | HubSource, Field(discriminator="name")]


class DataConfig(Config):
    """Training problems."""

    train: Source
    on_bad_row: Literal["error", "drop"] = "error"


# ---- sampling, training, evaluation --------------------------------------------------------------------------------


class SamplingConfig(Config):
    """How completions are drawn. Temperature 0 is greedy. Applied in the order temperature, top-k, top-p, min-p."""

    max_new_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)


class RolloutConfig(SamplingConfig):
    """The student's own samples in training."""

    num_samples: int = Field(default=1, ge=1)
    batch_size: int = Field(default=64, ge=1)
    merge_adapter: bool = False


class ScheduleConfig(Config):
    """Learning rate over steps: linear warm-up, then constant, linear or cosine decay to `final_frac` of the peak."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    num_warmup_steps: int = Field(default=0, ge=0)
    final_frac: float = Field(default=0.0, ge=0, le=1)


class TrainConfig(Config):
    """The optimizer and its steps. One step draws `num_problems_per_step` problems x `rollout.num_samples` samples."""

    num_steps: int = Field(ge=1)
    num_problems_per_step: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    schedule: ScheduleConfig = ScheduleConfig()
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    checkpoint_every_num_steps: int | None = Field(default=None, ge=1)
    num_checkpoints_kept: int = Field(default=2, ge=1)
    num_threads: int | None = Field(default=None, ge=1)


class EvalConfig(Config):
    """Held-out evaluation: problems x samples under frozen settings."""

    data: Source
    num_samples: int = Field(default=4, ge=1)
    seed: int = 1234
    sampling: SamplingConfig = SamplingConfig()
    batch_size: int = Field(default=64, ge=1)


class LogConfig(Config):
    """JSONL is always written; trackers join it."""

    trackers: tuple[Literal["trackio", "wandb", "tensorboard"], ...] = ()
    project: str = "opd"
    num_samples_per_step: int = Field(default=2, ge=0)


class Recipe(Config):
    """A whole run."""

    name: str = Field(min_length=1)
    folder: Path | None = None
    seed: int = 0
    student: StudentConfig
    teacher: TeacherConfig = SelfTeacherConfig()
    context: ContextConfig = ContextConfig()
    prompt: PromptConfig = PromptConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = ForwardKLConfig(name="forward_kl")
    train: TrainConfig
    eval: EvalConfig | None = None
    log: LogConfig = LogConfig()
