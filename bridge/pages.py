"""Host side of the paged K/V memory: which physical page belongs to which row.

Page 0 is NULL: it belongs to no row, and unused table entries point at it.
"""

import numpy as np

from bridge.positions import pages_for

NULL_PAGE = 0


class OutOfPagesError(RuntimeError):
    """Not enough free pages. Nothing was reserved."""


class PageAllocator:
    """Reserves pages for rows before a dispatch. The block table is int32 [rows, pages_per_row]."""

    def __init__(self, num_pages: int, page_size: int, rows: int, pages_per_row: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.pages_per_row = pages_per_row
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._owned: list[list[int]] = [[] for _ in range(rows)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, row: int, length: int) -> None:
        """Make sure that `row` has pages for positions 0..length-1. Raises OutOfPagesError and reserves nothing if it
        cannot."""
        wanted = pages_for(length, self.page_size)
        if wanted > self.pages_per_row:
            raise OutOfPagesError(f"{length} positions need {wanted} pages, a row has {self.pages_per_row}")
        missing = wanted - len(self._owned[row])
        if missing > self.num_free:
            raise OutOfPagesError(f"row {row} needs {missing} more pages, {self.num_free} are free")
        self._owned[row].extend(self._free.pop() for _ in range(missing))

    def release(self, row: int) -> None:
        """Give all pages of `row` back."""
        self._free.extend(reversed(self._owned[row]))
        self._owned[row] = []

    def table(self) -> np.ndarray:
        """A new int32 [rows, pages_per_row] block table."""
        table = np.full((len(self._owned), self.pages_per_row), NULL_PAGE, np.int32)
        for row, pages in enumerate(self._owned):
            table[row, : len(pages)] = pages
        return table

    def check_integrity(self) -> None:
        """Every page but NULL is free or belongs to exactly one row."""
        pages = sorted([*self._free, *(page for row in self._owned for page in row)])
        assert pages == list(range(NULL_PAGE + 1, self.num_pages)), f"pages lost or shared: {pages}"
