"""Sampling from a target through drafts, without a change of its distribution: lossless rejection sampling.

A draft drawn from q is kept with probability min(1, p / q), where p is the target's distribution; the first that is not
kept is replaced by a draw from what p has more of than q, max(p - q, 0) (Leviathan et al., 2023, arXiv:2211.17192).
Everything stays on the device.
"""

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits.

    temperature: 1e-6..1e6, divides the logits. top_k: only the k likeliest tokens; 0 for all. top_p: only the likeliest
    tokens that together reach this probability, in (0, 1]; 1 for all. generator: of the logits' device, for draws that
    can be repeated. Both limits are of the distribution after the temperature; top_k comes first.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", _is_number(self.temperature) and 1e-6 <= self.temperature <= 1e6, "a number in 1e-6..1e6"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("top_k", _is_number(self.top_k) and self.top_k >= 0 and self.top_k % 1 == 0, "a whole number of at least 0"),
        ):
            if not fits:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """What tokens are drawn from: float32, of the shape of logits [..., vocabulary]."""
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(int(self.top_k)).values[..., -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probabilities = scores.softmax(-1)
        if self.top_p < 1.0:
            falling, order = probabilities.sort(dim=-1, descending=True)
            likelier = falling.cumsum(-1) - falling  # the probability of all tokens that come before
            falling = falling.masked_fill(likelier >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, falling)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def draw(self, probabilities: Tensor) -> Tensor:
        """One index from each distribution [..., N], int64 [...]."""
        flat = probabilities.reshape(-1, probabilities.shape[-1])
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Drafts:
    """Drafts of N rows and what they were drawn from.

    token_ids int64 [B, N]. probabilities float32 [B, N, K], of the tokens `candidates` [B, N, K], or of the whole
    vocabulary where candidates is None; None for greedy drafts.
    """

    token_ids: Tensor
    probabilities: Tensor | None = None
    candidates: Tensor | None = None

    def first(self, rows: int) -> "Drafts":
        token_ids, *others = (x if x is None else x[:, :rows] for x in (self.token_ids, self.probabilities, self.candidates))
        assert token_ids is not None
        return Drafts(token_ids, *others)


def verify(sampling: Sampling, drafts: Drafts, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Decides which drafts stay and draws the token that follows them.

    target_logits [B, N + 1, vocabulary], row i for what follows the anchor and i drafts. Returns how many drafts stay,
    int64 [B] in 0..N, and the next token's id, int64 [B].
    """
    assert drafts.probabilities is not None
    target = sampling.probabilities(target_logits)
    tokens = drafts.token_ids[..., None]
    p = target[:, :-1].gather(-1, tokens).squeeze(-1)
    if drafts.candidates is None:
        q = drafts.probabilities.gather(-1, tokens).squeeze(-1)
    else:
        q = torch.where(drafts.candidates == tokens, drafts.probabilities, 0).sum(-1)
    chance = torch.rand(q.shape, device=q.device, generator=sampling.generator)
    kept = (chance * q < p).long().cumprod(1).sum(1)

    # The next token: from the target where all drafts stayed, else from what the drafter gave too little of.
    lane = torch.arange(kept.shape[0], device=kept.device)
    wanted = target[lane, kept]
    rejected_row = kept.clamp(max=drafts.token_ids.shape[1] - 1)
    offered = torch.where((kept == rejected_row)[:, None], drafts.probabilities[lane, rejected_row], 0)
    if drafts.candidates is None:
        rest = wanted - offered
    else:
        rest = wanted.scatter_add(-1, drafts.candidates[lane, rejected_row], -offered)
    rest = rest.clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)  # nothing is left where p and q agree to rounding
    return kept, sampling.draw(rest)
