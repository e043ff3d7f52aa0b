"""Published figures of DFlash on TPU, to stand beside estimates. They are measured, the estimates are not.

Source: Google Developers Blog, 4 May 2026: TPU v5p, greedy, batch 1. Qwen3-4B with z-lab's b16 drafter in a standalone
JAX loop (8 samples of 256 tokens); Llama-3.1-8B in the vLLM pipeline.
"""

from dataclasses import dataclass

from torch_dflash.config import DrafterConfig, TargetConfig
from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.tpu.chips import Chip
from torch_dflash.tpu.shapes import drafter_folder, target_folder

SOURCE = "Google Developers Blog, 4 May 2026"
CHIP = "v5p"
TARGET, DRAFTER = "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"


@dataclass(frozen=True)
class Published:
    """Of one data set. TPOT in milliseconds: plain decoding and DFlash. is_mean: the mean of the others."""

    name: str
    tau: float
    speed_up: float
    plain_tpot_ms: float
    dflash_tpot_ms: float
    is_mean: bool = False

    @property
    def step_ms(self) -> float | None:
        """What a DFlash step took. None of the mean: that of products is not the product of means."""
        return None if self.is_mean else self.dflash_tpot_ms * self.tau


QWEN3_4B = (
    Published("math500", 8.80, 5.72, 8.02, 1.40),
    Published("aime24", 6.48, 3.98, 7.69, 1.93),
    Published("aime25", 6.14, 3.35, 6.85, 2.05),
    Published("gsm8k", 5.40, 3.17, 7.32, 2.31),
    Published("humaneval", 5.76, 3.53, 7.70, 2.18),
    Published("mbpp", 6.16, 2.77, 7.31, 2.64),
    Published("mt-bench", 3.87, 2.36, 7.20, 3.05),
    Published("alpaca", 2.86, 1.65, 6.72, 4.08),
    Published("swe-bench", 3.35, 1.60, 6.85, 4.27),
)
AVERAGE = Published("average", 5.42, 3.13, 7.30, 2.66, is_mean=True)


@dataclass(frozen=True)
class Served:
    """A model in a serving pipeline. speed_up: mean over the data sets; TPOT in milliseconds of one of them."""

    target: str
    pipeline: str
    num_drafts: int
    speed_up: float
    name: str
    plain_tpot_ms: float
    dflash_tpot_ms: float


LLAMA = Served("Llama-3.1-8B", "vLLM on v5p", 10, 2.29, "mbpp", 9.81, 3.48)
# Cost of verifying K tokens against verifying 16, v5p, one sequence, context 256.
K_FLAT = ((16, 1.00), (128, 1.00), (256, 1.02), (512, 1.00), (1024, 1.00))


def comparable(target: TargetConfig, drafter: DrafterConfig, chip: Chip, tp: int, rows: int) -> bool:
    """Were the published figures measured with this pair, on this chip, in this way?"""
    same_target = target == read_target_config(target_folder(TARGET))
    same_drafter = drafter == read_drafter_config(drafter_folder(DRAFTER))
    return same_target and same_drafter and (chip.name, tp, rows) == (CHIP, 1, 1)
