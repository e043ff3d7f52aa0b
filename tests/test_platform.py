"""What a platform chooses, and the rows and pages of data-parallel groups: numbers in, numbers out."""

import jax.numpy as jnp
import numpy as np
import pytest

from bridge.pages import GroupedPages, OutOfPagesError
from bridge.platform import CPU, GPU, TPU, Platform, own_platform
from bridge.positions import doublings
from torch_dflash.engine import make_pages
from torch_dflash.state import Capacity
from torch_dflash.tpu.shapes import target_folder


@pytest.mark.parametrize(("first", "last", "widths"), [(8, 40, [8, 16, 32, 40]), (8, 5, [5]), (4, 8, [4, 8])])
def test_doublings(first: int, last: int, widths: list[int]) -> None:
    assert doublings(first, last) == widths


@pytest.mark.parametrize(
    ("platform", "pages", "widths"),
    [(CPU, 8, [4, 8]), (CPU, 1, [1]), (GPU, 8, [8]), (TPU, 40, [8, 16, 32, 40]), (TPU, 4, [4])],
)
def test_page_widths(platform: Platform, pages: int, widths: list[int]) -> None:
    assert platform.page_widths(pages, 64) == widths


def test_pools_are_padded_to_what_tiles() -> None:
    assert [TPU.stored_heads(n) for n in (1, 2, 3, 5, 8, 10)] == [1, 2, 4, 8, 8, 16]
    assert [TPU.stored_dim(n) for n in (64, 128, 192)] == [128, 128, 256]
    assert CPU.stored_heads(3) == 3 and CPU.stored_dim(64) == 64
    assert CPU.storage_dtype(jnp.bfloat16) == jnp.uint16 and TPU.storage_dtype(jnp.bfloat16) == jnp.bfloat16


def test_this_process_has_a_cpu() -> None:
    assert own_platform() == CPU and target_folder("default").is_dir()


def test_columns_of_a_dispatch() -> None:
    alone, grouped = Capacity.whole(6, 4, 16), Capacity.whole(6, 4, 16, groups=2)
    assert alone.columns([0, 3, 5]) == [0, 3, 5, 6]
    assert grouped.columns([0, 3, 5]) == [0, 6, 3, 5]  # the second group's rows in the second half
    assert grouped.columns([1]) == [1, 6]
    assert grouped.buckets == (2, 4, 6) and alone.buckets == (1, 2, 4, 6)
    assert [grouped.group_of(row) for row in range(7)] == [0, 0, 0, 1, 1, 1, 1]


def test_rows_are_rounded_up_and_each_group_has_all_its_pages() -> None:
    capacity = Capacity.whole(5, 4, 16, groups=2)
    assert (capacity.rows, capacity.num_pages) == (6, 1 + 3 * 4)
    assert isinstance(make_pages(capacity, 0), GroupedPages)


def test_groups_have_pages_of_their_own() -> None:
    pages = GroupedPages(num_pages=5, page_size=4, rows=4, pages_per_row=3, groups=2)
    assert pages.reserve(0, 12) == 0
    with pytest.raises(OutOfPagesError):
        pages.reserve(1, 8)  # one page is left in the first group
    prompt = list(range(9))
    assert pages.reserve(2, 10, prompt) == 0
    pages.remember(2, prompt)
    assert pages.reserve(3, 10, prompt) == 8  # shared within the second group
    table = pages.table([3, 0, 4])
    assert (table[0][:2] == pages.table([2])[0][:2]).all()
    assert set(table[1]) == {1, 2, 3} and not table[2].any()  # the row 4 stands for none
    assert pages.num_free == 1 + 0
    pages.release(0)
    assert pages.num_free == 4
    pages.check_integrity()
    assert pages.table().shape == (4, 3) and pages.table().dtype == np.int32
