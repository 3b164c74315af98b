"""From a row of logits to the target's token, and to the drafter's candidates.

`wire/sampling.py` states what is done in which order. Here is what it leaves open:

- The drafted tokens before a row count as if committed ("path"), in penalties and in min_tokens alike.
- Ids at or beyond the real vocabulary do not exist: they have probability 0, however wide a row is padded.
- Ties: of equal scores the lowest id wins. All ids equal to the k-th best are kept by top-k. Where the edge of the
  top-p set falls between equal logits, lower ids are kept first.
- Logits that are NaN or infinite where it matters, or all -inf, are a `NumericalError`, never a token.

Scores are float64 from the temperature on; a caller's row is never written to.

Without filters every id of the vocabulary takes part in the race argmax(s + g), but few can win. The HEAD best logits
are scored first. Any other id has s at most that of the last of them, so it needs g >= best - s_last, and g is
monotonic in the draw: the draws, integers and cheap, are compared with a bound, and only the ids above it are
scored. The result is the same as that of scoring all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.errors import NumericalError
from engine.noise import draw_at_least, draws, gumbel
from speculation.passes import Child, Sampling, TokenLogprob

HEAD = 256
TOP_P_HEAD = 1024
NEGATIVE_INFINITY = float("-inf")


class Sampler:
    """The sampling of one session: its parameters and its history.

    Args:
        num_prompt: the first that many committed tokens are the prompt.
        stop_ids: what min_tokens bans.
        vocab_size: number of real ids; None for the whole width of the rows.
    """

    def __init__(
        self, sampling: Sampling, *, num_prompt: int, stop_ids: Sequence[int] = (), vocab_size: int | None = None
    ) -> None:
        self.sampling = sampling
        self.num_prompt = num_prompt
        self.stop_ids = tuple(stop_ids)
        self.vocab_size = vocab_size
        self.num_committed = 0
        self._counts: dict[int, int] = {}  # token of prompt or answer -> times in the answer
        self._history: tuple[Tensor, Tensor] | None = None  # _counts as tensors, until the next commit
        self._biases = {int(token): bias for token, bias in sampling.logit_bias.items()}
        self._penalised = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self._filtered = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0

    @property
    def is_plain(self) -> bool:
        """Whether a choice depends on logits, temperature and noise alone."""
        return not (self._penalised or self._biases or self._filtered or (self.stop_ids and self.sampling.min_tokens))

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, the prompt's first."""
        for token in tokens:
            in_answer = self.num_committed >= self.num_prompt
            self._counts[token] = self._counts.get(token, 0) + in_answer
            self.num_committed += 1
        self._history = None

    def choose(self, logits: Tensor, position: int, path: Sequence[int] = ()) -> int:
        """The token at `position`.

        Args:
            logits: [width], any float dtype.
            position: index in prompt + answer of the token to be chosen.
            path: drafted tokens between the committed ones and this row.

        Raises:
            NumericalError: see the module's docstring.
        """
        row = self._processed(logits, path)
        best = int(row.argmax())
        self._check(float(row[best]), position)
        if self.sampling.greedy:
            return best
        ids, scores = self._noisy_scores(row, position, 1)
        return int(ids[scores.argmax()])

    def propose(self, logits: Tensor, position: int, path: Sequence[int], num: int) -> list[Child]:
        """A drafter's `num` best candidates for `position`, best first, by the scores that `choose` compares.

        The first is `choose` of the same row. `Child.logprob` is the log-softmax of the scores (noise included: it
        is known, so it is part of what makes a candidate likely), over the ids that were scored. Fewer than `num`
        come back when the filters keep fewer.
        """
        row = self._processed(logits, path)
        best = int(row.argmax())
        self._check(float(row[best]), position)
        if self.sampling.greedy:
            wide = row if row.dtype == torch.float64 else row.to(torch.float32)
            total = float(torch.logsumexp(wide, 0))
            ids = _best_ids(wide, num)
            scores = wide[ids].to(torch.float64)
        else:
            ids, scores = self._noisy_scores(row, position, num)
            total = float(torch.logsumexp(scores, 0))
            top = _best_ids(scores, num)
            ids, scores = ids[top], scores[top]
        pairs = zip(ids.tolist(), scores.tolist(), strict=True)
        return [Child(token=i, logprob=min(0.0, s - total)) for i, s in pairs if s > NEGATIVE_INFINITY]

    def propose_rows(
        self, logits: Tensor, positions: Sequence[int], paths: Sequence[Sequence[int]], num: int
    ) -> list[list[Child]]:
        """`propose` for each row of logits [n, width]; in one go where no row needs treatment of its own."""
        sampling = self.sampling
        banned = self.stop_ids and self.num_committed - self.num_prompt < sampling.min_tokens
        if sampling.greedy and not (self._penalised or self._biases or banned):
            wide = logits if self.vocab_size is None else logits[:, : self.vocab_size]
            wide = wide if wide.dtype == torch.float64 else wide.to(torch.float32)
            values, ids = wide.topk(min(num + 1, wide.shape[1]), dim=1)
            totals = torch.logsumexp(wide, 1, keepdim=True)
            # Equals go by the lowest id, which topk leaves open.
            tied = bool((values[:, 1:] == values[:, :-1]).any())
            if not tied and bool(torch.isfinite(values[:, 0]).all()):
                pairs = zip(ids[:, :num].tolist(), (values - totals)[:, :num].tolist(), strict=True)
                return [
                    [
                        Child(token=i, logprob=min(0.0, lp))
                        for i, lp in zip(row, lps, strict=True)
                        if lp > NEGATIVE_INFINITY
                    ]
                    for row, lps in pairs
                ]
        return [
            self.propose(row, position, path, num) for row, position, path in zip(logits, positions, paths, strict=True)
        ]

    def logprobs(self, logits: Tensor, path: Sequence[int], token: int, num: int) -> TokenLogprob:
        """Log-probability of `token` and of the `num` best, after penalties and bias, before temperature and filters.

        Ids of probability 0 are not among the best.
        """
        row = torch.log_softmax(self._processed(logits, path).to(torch.float64), 0)
        ids = _best_ids(row, num)
        best = [(i, lp) for i, lp in zip(ids.tolist(), row[ids].tolist(), strict=True) if lp > NEGATIVE_INFINITY]
        return TokenLogprob(
            logprob=float(row[token]) if token < row.numel() else NEGATIVE_INFINITY,
            top_ids=tuple(i for i, _ in best),
            top_logprobs=tuple(lp for _, lp in best),
        )

    def _check(self, best: float, position: int) -> None:
        # argmax takes NaN for the greatest, so the best value tells of any NaN in the row.
        if not math.isfinite(best):
            raise NumericalError(f"logits for position {position} have {best} as their best value")

    def _processed(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """The row [vocab] after penalties, bias, min_tokens: a float64 copy, or the caller's where nothing applies."""
        sampling = self.sampling
        row = logits if self.vocab_size is None else logits[: self.vocab_size]
        banned: tuple[int, ...] = ()
        if self.num_committed - self.num_prompt + len(path) < sampling.min_tokens:
            banned = self.stop_ids
        if not (self._penalised or self._biases or banned):
            return row
        raw = row
        row = raw.to(torch.float64, copy=True)
        if self._penalised:
            if self._history is None or self._history[0].device != row.device:
                self._history = _counted(self._counts, row.device)
            # From the raw logits, so that tokens of the path are not penalised twice.
            self._penalise(raw, row, *self._history)
            drafted = Counter(path)
            counts = {token: self._counts.get(token, 0) + num for token, num in drafted.items()}
            self._penalise(raw, row, *_counted(counts, row.device))
        width = row.numel()
        for token, bias in self._biases.items():
            if token < width:
                row[token] += bias
        for token in banned:
            if token < width:
                row[token] = NEGATIVE_INFINITY
        return row

    def _penalise(self, raw: Tensor, row: Tensor, ids: Tensor, counts: Tensor) -> None:
        """Set row[ids] to raw[ids] after penalties. ids: int64 [n], counts in the answer: float64 [n]."""
        if ids.numel() == 0:
            return
        inside = ids < row.numel()
        ids, counts = ids[inside], counts[inside]
        values = raw[ids].to(torch.float64)
        penalty = self.sampling.repetition_penalty
        if penalty != 1.0:
            values = torch.where(values > 0, values / penalty, values * penalty)
        values = values - counts * self.sampling.frequency_penalty
        row[ids] = values - (counts > 0) * self.sampling.presence_penalty

    def _noisy_scores(self, row: Tensor, position: int, num: int) -> tuple[Tensor, Tensor]:
        """Ids [n], ascending, and their scores [n], float64, with the `num` best of all kept ids among them."""
        if self._filtered:
            ids, scaled = self._kept(row)
            return ids, scaled + gumbel(self.sampling.seed, position, ids)
        every = torch.arange(row.numel(), device=row.device)
        if row.numel() <= 2 * HEAD or num > HEAD:
            return every, self._scaled(row, row.max()) + gumbel(self.sampling.seed, position, every)
        values, head = row.topk(HEAD)
        scaled = self._scaled(values, values[0])
        scores = scaled + gumbel(self.sampling.seed, position, head)
        needed = float(scores.topk(num).values[-1] - scaled[-1])
        may_win = draws(self.sampling.seed, position, every) >= draw_at_least(needed)
        may_win[head] = True
        ids = may_win.nonzero().squeeze(1)
        return ids, self._scaled(row[ids], values[0]) + gumbel(self.sampling.seed, position, ids)

    def _scaled(self, values: Tensor, best: Tensor) -> Tensor:
        """Logits over temperature, float64, shifted so that the best is 0 (a tiny temperature does not overflow)."""
        return (values.to(torch.float64) - best.to(torch.float64)) / self.sampling.temperature

    def _kept(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [n] that the filters keep, ascending, and their scaled logits [n]."""
        sampling = self.sampling
        scaled = self._scaled(row, row.max())
        floor = NEGATIVE_INFINITY
        if 0 < sampling.top_k < scaled.numel():
            floor = float(scaled.topk(sampling.top_k).values[-1])
        if sampling.top_p < 1.0 and floor == NEGATIVE_INFINITY:
            total = torch.logsumexp(scaled, 0)
            ids = _top_p_superset(scaled, total, sampling.top_p)
            scaled = scaled[ids]
        else:
            ids = ((scaled >= floor) & (scaled > NEGATIVE_INFINITY)).nonzero().squeeze(1)
            scaled = scaled[ids]
            total = torch.logsumexp(scaled, 0)
        if sampling.top_p < 1.0:
            ordered, order = scaled.sort(descending=True, stable=True)
            cumulative = (ordered - total).exp().cumsum(0)
            # An id is kept while those before it have not reached top_p.
            kept = order[: 1 + int((cumulative[:-1] < sampling.top_p).sum())].sort().values
            ids, scaled = ids[kept], scaled[kept]
        if sampling.min_p > 0.0:
            likely = scaled >= math.log(sampling.min_p)
            ids, scaled = ids[likely], scaled[likely]
        return ids, scaled


def _counted(counts: Mapping[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(list(counts), dtype=torch.int64, device=device)
    return ids, torch.tensor(list(counts.values()), dtype=torch.float64, device=device)


def _best_ids(scores: Tensor, num: int) -> Tensor:
    """Indices of the `num` best, best first, of equals the lowest index first (topk alone leaves that open)."""
    num = min(num, scores.numel())
    if num == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    if num == 1:
        return scores.argmax().reshape(1)
    ids = (scores >= scores.topk(num).values[-1]).nonzero().squeeze(1)
    return ids[scores[ids].sort(descending=True, stable=True).indices[:num]]


def _top_p_superset(scaled: Tensor, total: Tensor, top_p: float) -> Tensor:
    """Ids [n], ascending, that contain the top-p set: if few will do all those above some logit, else all."""
    if scaled.numel() > TOP_P_HEAD:
        values = scaled.topk(TOP_P_HEAD).values
        # Ids equal to the last value are left out together, so that the set does not hang on topk's choice of ties.
        above = values[values > values[-1]]
        if float((above - total).exp().sum()) >= top_p + 1e-9:
            return (scaled > values[-1]).nonzero().squeeze(1)
    return (scaled > NEGATIVE_INFINITY).nonzero().squeeze(1)
