"""What a training run is made of."""

from dataclasses import dataclass, field

from torch_dflash.train.answers import AnswerPlan
from torch_dflash.train.batches import BatchPlan
from torch_dflash.train.evaluate import HeldOutPlan
from torch_dflash.train.trainer import TrainPlan


@dataclass(frozen=True)
class DrafterPlan:
    """The drafter's shape. mask_token_id None: the last special token that no text contains."""

    num_layers: int = 3
    block_size: int = 8
    num_taps: int = 4
    taps: tuple[int, ...] = ()  # empty: DFlash's own choice of num_taps
    mask_token_id: int | None = None


@dataclass(frozen=True)
class Eagle3Plan:
    """An EAGLE-3 head's shape. draft_vocab_size: rows of its head at most; there is none for a token that no answer
    contains. taps: empty for EAGLE's own choice."""

    draft_vocab_size: int = 8192
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """All that a training run is made of."""

    drafter: DrafterPlan | Eagle3Plan = field(default_factory=DrafterPlan)
    answers: AnswerPlan = field(default_factory=AnswerPlan)
    batches: BatchPlan = field(default_factory=BatchPlan)
    training: TrainPlan = field(default_factory=TrainPlan)
    held_out: HeldOutPlan = field(default_factory=HeldOutPlan)
    mesh: int = 1  # devices that share the rows of a step
    invented: int = 0
    bulk: bool = False  # answers in bulk, instead of by the engine
    accelerator: bool = False  # features in device memory, instead of on disk
    rounds: int = 1  # bulk answers: once greedily, then with varied openings, until there are so many tokens
    answer_tokens: float = float("inf")
    train_seconds: float | None = None  # steps are set from the measured time of a step
