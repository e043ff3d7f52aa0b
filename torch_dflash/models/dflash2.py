"""What DFlash 2 adds to the drafter: convolutions inside a block, and a choice among each position's candidates
(parameter names and mathematics of PyPI dflash 0.1.0).

Letters: R rows, T tokens of a block, E drafter hidden size, G channel groups, W kernel size, K positions, C candidates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dflash.config import Convolution, Selector


class BlockConvolution(nn.Module):
    """Depthwise and causal over the positions of one block, before and behind what it surrounds. Each tap of a kernel
    is a base of its own per channel and a part that depends on the input, one for each group of channels."""

    def __init__(self, config: Convolution, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        groups = hidden_size // config.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, config.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.kernel_size * groups, bias=False)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R,T,E] -> two of [R,T,W,E]: for the input, and for what will come of it."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, self.config.kernel_size, -1))
        dynamic = dynamic[..., None].expand(*dynamic.shape, self.config.group_size).flatten(-2)
        before, behind = (self.base_kernel + dynamic).unbind(-3)
        return before, behind


def convolve(kernel: Tensor, x: Tensor) -> Tensor:
    """kernel [R,T,W,E], x [R,T,E] -> [R,T,E]: tap w of position t meets x[t - w]; before the block there are zeros."""
    taps = [kernel[..., w, :] * F.pad(x, (0, 0, w, 0))[:, : x.shape[1]] for w in range(kernel.shape[-2])]
    return torch.stack(taps).sum(0)


class CandidateSelector(nn.Module):
    """How well a token follows another at a place of the block."""

    def __init__(self, config: Selector, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Normed hidden states [R,K,E], ids of the tokens before int32[R,K,C'], candidates int32[R,K,C] -> float32
        [R,K,C',C], to be added to the candidates' logits."""
        place = self.hidden_projection(hidden)[..., None, :]
        first = F.embedding(before, self.predecessor_codebook) * place
        return first.float() @ F.embedding(candidates, self.successor_codebook).float().mT
