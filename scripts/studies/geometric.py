"""tau against the number of drafts K: of accept counts, and of the model with one acceptance alpha for all positions.

Letters: K drafts of a step, n those of the run, h[a] steps that accepted exactly a drafts, S[k] share of the steps
whose first k drafts were all accepted.
"""

import math
from collections.abc import Sequence

TAIL = 3  # positions that the continued decay is taken from


def truncated_tau(histogram: Sequence[int], num_drafts: int) -> float:
    """1 + mean of min(a, K): what the same steps would have kept with K <= n drafts."""
    return 1 + sum(min(a, num_drafts) * count for a, count in enumerate(histogram)) / sum(histogram)


def fitted_alpha(histogram: Sequence[int]) -> float:
    """Accepted drafts / judged drafts: the accepted ones, and the first wrong one of each step that has one. The
    likeliest alpha of the model, of accept counts that end at n."""
    accepted = sum(a * count for a, count in enumerate(histogram))
    return accepted / (accepted + sum(histogram[:-1]))


def geometric_tau(alpha: float, num_drafts: float) -> float:
    """(1 - alpha^(K+1)) / (1 - alpha): 1 + alpha + ... + alpha^K."""
    return num_drafts + 1 if alpha == 1 else (1 - alpha ** (num_drafts + 1)) / (1 - alpha)


def geometric_share(alpha: float, num_drafts: float) -> float:
    """Of the limit for endless drafts: 1 - alpha^(K+1)."""
    return 1 - alpha ** (num_drafts + 1)


def tail_alpha(shares: Sequence[float]) -> float:
    """Acceptance of the last TAIL positions together: drafts accepted there / drafts judged there. 0 where none was
    judged."""
    judged = [1.0, *shares][-TAIL - 1 : -1]
    return sum(shares[-TAIL:]) / sum(judged) if sum(judged) else 0.0


def continued_tau(shares: Sequence[float], num_drafts: float) -> float:
    """1 + S[1] + ... + S[K], with S[n+j] = S[n] * tail_alpha^j behind the measured ones. K may be infinite."""
    n = len(shares)
    if num_drafts <= n:
        return 1 + sum(shares[: int(num_drafts)])
    tail, last = tail_alpha(shares), shares[-1]
    if last == 0 or tail == 0:
        return 1 + sum(shares)
    if tail == 1:
        return 1 + sum(shares) + last * (num_drafts - n)
    return 1 + sum(shares) + last * tail * (1 - tail ** (num_drafts - n)) / (1 - tail)


def slope_in_alpha(alpha: float, num_drafts: int) -> float:
    """d tau / d alpha of the model: 1 + 2 alpha + ... + K alpha^(K-1)."""
    return sum(k * alpha ** (k - 1) for k in range(1, num_drafts + 1))


def slope_in_k(alpha: float, num_drafts: float) -> float:
    """d tau / d K of the model, K taken as a real number."""
    if alpha in (0, 1):
        return float(alpha)
    return -math.log(alpha) * alpha ** (num_drafts + 1) / (1 - alpha)


def alpha_for(tau: float, num_drafts: int) -> float | None:
    """The alpha with which K drafts give tau, by bisection; None where K drafts cannot."""
    if not 1 <= tau <= num_drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if geometric_tau(middle, num_drafts) < tau else (low, middle)
    return high
