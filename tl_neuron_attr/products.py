"""Products with the vocabulary: in blocks, without a converted copy, and rounded alike whatever stands beside.

Libraries multiply a few rows by other kernels than many rows, and sum one row in another order than several. Here
every row of a result is computed the same way, so in float32 on a processor a neuron's score is the same to the last
bit whether it is scored alone or among thousands, and ties stay ties.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

MIN_ROWS = 32
# So few rows are multiplied by so many columns at once on a processor, a fifth faster than by all: the result stays
# in a cache until it is stored.
_FEW_ROWS = 128
_FEW_COLUMNS = 2**11


def slices(length: int, step: int) -> Iterator[slice]:
    step = max(1, min(step, length))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def matmul(x: Tensor, W_U: Tensor, memory_budget: int) -> Tensor:
    """``x @ W_U`` in the precision of ``x``, without a converted copy of the whole unembedding."""
    few = x.device.type == "cpu" and len(x) <= _FEW_ROWS
    if W_U.dtype == x.dtype and not few:
        return product(x, W_U)
    out = x.new_empty(len(x), W_U.shape[1])
    step = memory_budget // (8 * x.dtype.itemsize * W_U.shape[0])
    for block in slices(W_U.shape[1], min(step, _FEW_COLUMNS) if few else step):
        out[:, block] = product(x, W_U[:, block])
    return out


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix``, each row rounded alike whatever rows stand beside it.

    Libraries multiply a few rows by other kernels than many rows; with zero rows up to a minimum, a neuron's
    score is the same to the last bit whether it is scored alone or among thousands, so ties stay ties.
    """
    missing = MIN_ROWS - len(x)
    if missing <= 0:
        return x @ matrix.to(x.dtype)
    return (torch.cat([x, x.new_zeros(missing, x.shape[1])]) @ matrix.to(x.dtype))[: len(x)]


def product_of_few(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix`` in one reading of the matrix, for so few rows that reading it is what takes the time.

    Rounded otherwise than :func:`product`. Where the matrix's columns are contiguous, as of a transposed weight,
    libraries are several times faster with the factors exchanged, and with two columns than with one.
    """
    if matrix.stride(0) != 1:
        return x @ matrix
    rows = x if len(x) > 1 else torch.cat([x, x])
    return (matrix.T @ rows.T).T[: len(x)]


def along(directions: Tensor, options: Tensor) -> Float[Tensor, "direction option"]:
    """Inner products with a few options, rounded alike whatever stands beside (a product by one column is not)."""
    if len(options) >= MIN_ROWS:
        return product(directions, options.T)
    return torch.stack([(directions * option).sum(-1) for option in options], -1)
