"""Matrices of a layer, as the products of a step read them.

On CPUs a matrix is packed once, when it is loaded, into the blocks that oneDNN's kernels read: the
order of plain memory has to be changed in every product anew, which takes as long as a decode step
of a few sequences itself. A packed matrix has the same bytes and gives the same results, in bf16 to
the bit. Its layout is the library's own, so nothing but these products can read it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

ROWS = 128
"""Rows of one product of a packed matrix: its result is a new tensor, which then stays small."""


class Projection(Protocol):
    """A matrix `[inputs, outputs]` that is multiplied from the left."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """`out = rows @ matrix`; `rows` are `[n, inputs]`."""

    def add_product(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """`out += rows @ matrix`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """In the order of a tensor."""

    matrix: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Of its memory."""
        return int(self.matrix.nbytes)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Projection`."""
        torch.mm(rows, self.matrix, out=out)

    def add_product(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Projection`."""
        out.addmm_(rows, self.matrix)


@dataclass(frozen=True, slots=True)
class Packed:
    """In oneDNN's blocks (as torch's compiler packs constant weights when it freezes a graph)."""

    matrix: torch.Tensor
    nbytes: int

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Projection`."""
        for part, target in zip(torch.split(rows, ROWS), torch.split(out, ROWS), strict=True):
            target.copy_(self._product(part))

    def add_product(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Projection`."""
        for part, target in zip(torch.split(rows, ROWS), torch.split(out, ROWS), strict=True):
            target.add_(self._product(part))

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.matrix, None, "none", [], ""
        )
        return product


def can_pack(dtype: torch.dtype, device: str) -> bool:
    """Whether matrices of this type can be packed here."""
    if device != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def projection(matrix: torch.Tensor) -> Projection:
    """The projection of `[outputs, inputs]`, the order of files; `matrix` itself is not kept.

    Packed where that can be and costs no memory: sizes that are no multiples of a block would be
    filled up, and the budget counts on parameters alone.
    """
    if can_pack(matrix.dtype, matrix.device.type):
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, None)
        nbytes = int(torch.ops.mkldnn._nbytes(packed))
        if nbytes == matrix.nbytes:
            return Packed(packed, nbytes)
    if matrix.dtype == torch.float32:
        return Plain(matrix.t().contiguous())  # twice as fast for a few rows
    return Plain(matrix.clone().t())
