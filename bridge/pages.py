"""Host side of the paged K/V memory: which physical page belongs to which row, and which prompts are in pages already.

Page 0 is NULL: it belongs to no row, and unused table entries point at it.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import count

import numpy as np

from bridge.positions import pages_for

NULL_PAGE = 0
ROOT = 0

Key = tuple[int, tuple[int, ...]]  # (node of the page before, tokens of this page and of its lookahead)


class OutOfPagesError(RuntimeError):
    """Not enough free pages. Nothing was reserved."""


class PageAllocator:
    """Reserves pages for rows before a dispatch. The block table is int32 [rows, pages_per_row].

    Full pages of prompts are remembered: a later prompt with the same beginning gets the same pages, which nobody
    writes again. A remembered page that no row uses is given away when free pages run out, the longest unused first.

    lookahead: tokens behind a page that its content depends on, and by which it is known, too.
    """

    def __init__(self, num_pages: int, page_size: int, rows: int, pages_per_row: int, lookahead: int = 0) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.pages_per_row = pages_per_row
        self.lookahead = lookahead
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._owned: list[list[int]] = [[] for _ in range(rows)]
        self._users: Counter[int] = Counter()  # page -> rows that hold it
        self._nodes = count(ROOT + 1)
        self._known: OrderedDict[Key, tuple[int, int]] = OrderedDict()  # -> (page, node), longest unused first
        self._key_of: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be had: free ones and remembered ones that no row uses."""
        return len(self._free) + sum(1 for page in self._key_of if not self._users[page])

    def reserve(self, row: int, length: int, prompt: Sequence[int] = ()) -> int:
        """Make sure that `row` has pages for positions 0..length-1.

        An empty row takes remembered pages for the beginning of `prompt`, but not for all of it: its last token must be
        processed for what follows it. Returns how many tokens those pages hold. Raises OutOfPagesError and reserves
        nothing if it cannot.
        """
        wanted = pages_for(length, self.page_size)
        if wanted > self.pages_per_row:
            raise OutOfPagesError(f"{length} positions need {wanted} pages, a row has {self.pages_per_row}")
        owned = self._owned[row]
        shared = [] if owned else self._find(prompt[:-1])
        idle = sum(1 for page in shared if not self._users[page])
        missing = wanted - len(owned) - len(shared)
        if missing > self.num_free - idle:
            raise OutOfPagesError(f"row {row} needs {missing} more pages, {self.num_free - idle} are free")
        self._take(row, shared)
        self._take(row, [self._free_page() for _ in range(missing)])
        return len(shared) * self.page_size

    def _take(self, row: int, pages: list[int]) -> None:
        self._owned[row].extend(pages)
        self._users.update(pages)

    def _find(self, tokens: Sequence[int]) -> list[int]:
        """The remembered pages of the longest beginning of `tokens`."""
        pages, keys, node = [], list[Key](), ROOT
        for key_tokens in self._full_pages(tokens):
            key = (node, key_tokens)
            if key not in self._known:
                break
            page, node = self._known[key]
            pages.append(page)
            keys.append(key)
        self._used_now(keys)
        return pages

    def _used_now(self, keys: list[Key]) -> None:
        """Of one beginning, first page first. The last page is to be given away first: without it the others still
        serve."""
        for key in reversed(keys):
            self._known.move_to_end(key)

    def _full_pages(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size, known = self.page_size, len(tokens) - self.lookahead
        return [tuple(tokens[at : at + size + self.lookahead]) for at in range(0, known // size * size, size)]

    def _free_page(self) -> int:
        if self._free:
            return self._free.pop()
        key = next(key for key, (page, _) in self._known.items() if not self._users[page])
        page, _ = self._known.pop(key)
        del self._key_of[page]
        return page

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        """The pages of `row` hold `tokens` from position 0 on: others may share the full ones from now on."""
        keys, node = list[Key](), ROOT
        for page, key_tokens in zip(self._owned[row], self._full_pages(tokens), strict=False):
            key = (node, key_tokens)
            if key not in self._known:  # else another row was first, and this page stays the row's own
                if page in self._key_of:
                    break  # known as the continuation of pages that were given away since
                self._known[key] = page, next(self._nodes)
                self._key_of[page] = key
            node = self._known[key][1]
            keys.append(key)
        self._used_now(keys)

    def release(self, row: int) -> None:
        """`row` gives up all its pages. Remembered ones that no other row uses stay until they are needed."""
        for page in reversed(self._owned[row]):
            self._users[page] -= 1
            if not self._users[page] and page not in self._key_of:
                self._free.append(page)
        self._owned[row] = []

    def table(self, rows: Sequence[int] | None = None) -> np.ndarray:
        """A new int32 [len(rows), pages_per_row] block table, of all rows by default. A row that does not exist has
        none."""
        rows = range(len(self._owned)) if rows is None else rows
        table = np.full((len(rows), self.pages_per_row), NULL_PAGE, np.int32)
        for i, row in enumerate(rows):
            pages = self._owned[row] if row < len(self._owned) else []
            table[i, : len(pages)] = pages
        return table

    def check_integrity(self) -> None:
        """Every page but NULL is free, or held by as many rows as are counted, or remembered; shared ones are
        remembered."""
        held = Counter(page for pages in self._owned for page in pages)
        assert held == +self._users, f"users counted wrong: {held} and {+self._users}"
        idle = [page for page in self._key_of if not held[page]]
        pages = sorted([*self._free, *held, *idle])
        assert pages == list(range(NULL_PAGE + 1, self.num_pages)), f"pages lost or shared: {pages}"
        assert all(page in self._key_of for page, users in held.items() if users > 1), "a private page is shared"
        assert {page: key for key, (page, _) in self._known.items()} == self._key_of, "remembered pages are off"


class GroupedPages:
    """An allocator for each group of rows: data-parallel devices, each with pages of its own that the others cannot
    reach. Page numbers are the group's. Methods as `PageAllocator`'s; num_pages is of one group."""

    def __init__(
        self, num_pages: int, page_size: int, rows: int, pages_per_row: int, lookahead: int = 0, groups: int = 1
    ) -> None:
        self.rows, self.size = rows, rows // groups
        each = (num_pages, page_size, self.size, pages_per_row, lookahead)
        self._groups = [PageAllocator(*each) for _ in range(groups)]

    @property
    def num_free(self) -> int:
        return sum(pages.num_free for pages in self._groups)

    def reserve(self, row: int, length: int, prompt: Sequence[int] = ()) -> int:
        return self._groups[row // self.size].reserve(row % self.size, length, prompt)

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        self._groups[row // self.size].remember(row % self.size, tokens)

    def release(self, row: int) -> None:
        self._groups[row // self.size].release(row % self.size)

    def table(self, rows: Sequence[int] | None = None) -> np.ndarray:
        every = np.concatenate([pages.table([*range(self.size)]) for pages in self._groups])
        none = np.full_like(every[:1], NULL_PAGE)
        return np.concatenate([every, none])[list(range(self.rows) if rows is None else rows)]

    def check_integrity(self) -> None:
        for pages in self._groups:
            pages.check_integrity()
