"""Candidates of several prompts and both kinds at once: their rows read once, their directions multiplied once.

A neuron's score depends on its prompt by the base, the coefficient ``a`` and the frozen scales, but not by the
direction: with ``s`` the final norm's scale times that of a norm behind the sublayer, ``a N(w) = (a / s) (s N(w))``,
and ``s N(w)`` is the weights' alone. So one product ``W_U' s N(w)`` serves every prompt and every source position at
which the row is a candidate, and one product of a layer's rows with all prompts' vectors ``q`` gives all bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_neuron_attr.moments import MANY_SOURCES
from tl_neuron_attr.products import product_of_few
from tl_neuron_attr.scoring import Vectors, changes_together
from tl_neuron_attr.writes import directions

if TYPE_CHECKING:
    from tl_neuron_attr.candidates import Candidates


def along_rows(
    pool: "Candidates", index: int, q: Sequence[Float[Tensor, "_ d_model"]]
) -> list[tuple[Float[Tensor, "row _"], Float[Tensor, " row"]]]:
    """``<q, w>`` of every row of a layer for each prompt's ``q``, and the rows' lengths."""
    rows = directions(pool.trace, pool.kind, pool.layers[index])
    together = torch.cat([own.to(rows.device) for own in q])
    step = max(1, pool.readout.memory_budget // (16 * together.dtype.itemsize * rows.shape[1]))
    along: list[Tensor] = []
    length: list[Tensor] = []
    for part in rows.split(step):
        w = part.to(together.dtype).T  # rows are often a transposed view: so both passes read it as it lies
        along.append(product_of_few(together, w).T)
        length.append(w.square().sum(0).sqrt())
    lengths = torch.cat(length)
    return [(own, lengths) for own in torch.cat(along).split([len(own) for own in q], 1)]


def score_together(asked: "Sequence[tuple[Candidates, Tensor]]") -> list[Float[Tensor, " _"]]:
    """Exact scores (nats, on the CPU) of numbered candidates of pools whose bases are of one reading."""
    readout, wanted = asked[0][0].readout, _Wanted.of(asked)
    scores = torch.empty(len(wanted.pool), dtype=readout.dtype)
    at_once = readout.directions_at_once()
    for first in range(0, len(wanted.starts) - 1, at_once):
        place, exact = wanted.scored(first, min(first + at_once, len(wanted.starts) - 1))
        scores[place] = exact
    return list(scores.split([len(number) for _, number in asked]))


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Candidates of several pools in the order of their directions; numbers are on the CPU.

    ``order`` are the candidates' places, direction ``i`` from ``starts[i]`` to ``starts[i + 1]``; ``layer`` and
    ``row`` are those of each direction, ``layer`` counted through the pools' kinds.
    """

    pools: "Sequence[Candidates]"
    pool: Int[Tensor, " candidate"]
    index: Int[Tensor, " candidate"]
    row: Int[Tensor, " candidate"]
    weight: Float[Tensor, " candidate"]
    direction: Int[Tensor, " candidate"]
    order: Int[Tensor, " candidate"]
    starts: list[int]
    layer: Int[Tensor, " direction"]

    @staticmethod
    def of(asked: "Sequence[tuple[Candidates, Tensor]]") -> "_Wanted":
        pools = [pool for pool, _ in asked]
        places = [pool.numbering.places(number) for pool, number in asked]
        index, row = torch.cat([at[0] for at in places]), torch.cat([at[1] for at in places])
        pool = torch.arange(len(pools)).repeat_interleave(torch.tensor([len(number) for _, number in asked]))
        layer = torch.cat(
            [
                2 * torch.tensor(one.layers)[at[0]] + (one.kind == "attn")
                for one, at in zip(pools, places, strict=True)
            ]
        )
        n_rows = int(row.max()) + 1 if len(row) else 1
        key, direction, counts = torch.unique(layer * n_rows + row, return_inverse=True, return_counts=True)
        return _Wanted(
            pools=pools,
            pool=pool,
            index=index,
            row=row,
            weight=torch.cat([one.weights(number) for one, number in asked]),
            direction=direction,
            order=direction.argsort(stable=True),
            starts=[0, *counts.cumsum(0).tolist()],
            layer=key // n_rows,
        )

    def scored(self, first: int, last: int) -> tuple[Int[Tensor, " place"], Float[Tensor, " place"]]:
        """Places and scores of the candidates along some directions."""
        place = self.order[self.starts[first] : self.starts[last]]
        place = place[self.pool[place].argsort(stable=True)]
        pool, counts = torch.unique_consecutive(self.pool[place], return_counts=True)
        of_pools = place.split(counts.tolist())
        each = [self._vectors(self.pools[one], own, first) for one, own in zip(pool.tolist(), of_pools, strict=True)]
        return place, torch.cat(changes_together(self._directions(first, last), each)).cpu()

    def _vectors(self, pool: "Candidates", place: Int[Tensor, " place"], first: int) -> Vectors:
        """A pool's candidates, in the order of their directions, those of one direction on one line."""
        device = pool.readout.W_U.device
        direction, counts = torch.unique_consecutive(self.direction[place], return_counts=True)
        starts = counts.cumsum(0) - counts
        lines = torch.stack([self.index[place[starts]], direction - first]).to(device)
        line = torch.arange(len(counts)).repeat_interleave(counts).to(device)
        many = pool.numbering.n_sources >= MANY_SOURCES
        return Vectors(pool.bases, lines[0], lines[1], line, self.weight[place].to(device), many)

    def _directions(self, first: int, last: int) -> Float[Tensor, "direction d_model"]:
        one_of_each = self.order[torch.tensor(self.starts[first:last])]
        rows = self.row[one_of_each].to(self.pools[0].readout.W_U.device)
        counts = torch.unique_consecutive(self.layer[first:last], return_counts=True)[1].tolist()
        made: list[Tensor] = []
        start = 0
        for part in rows.split(counts):
            at = int(one_of_each[start])
            made.append(self.pools[int(self.pool[at])].plain_directions(int(self.index[at]), part))
            start += len(part)
        return torch.cat(made)
