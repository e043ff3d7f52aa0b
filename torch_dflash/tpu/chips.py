"""The TPU chips that programs are compiled for and estimated on.

Sources: docs.cloud.google.com/tpu/docs/v5p, /v6e and /v5e ("Key specifications"; the bandwidths of v6e and v5e are
those of the page up to 2025, newer versions round them to 1600 and 800 GBps). Where a page says GB for the memory and
not GiB, it is taken at its word: the smaller reading (libtpu 0.0.52 lets programs have 95.73, 31.24 and 15.75 GiB).
The clock is not published: 1.75 and 1.5 GHz are assumed.
"""

from dataclasses import dataclass

from torch_dflash.errors import InputError

GIB = 2**30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class Chip:
    """One chip (all its cores). flops_per_second: peak in bfloat16. ici_bytes_per_second: all links of a chip, both
    directions together. topologies: (chips, name for `jax.experimental.topologies.get_topology_desc`), ascending."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_second: float
    flops_per_second: float
    clock_hz: float
    ici_bytes_per_second: float
    topologies: tuple[tuple[int, str], ...]

    def topology(self, chips: int) -> str:
        """The smallest topology that has `chips` chips. It may have more: a program takes the first ones. Raises
        InputError."""
        for size, name in self.topologies:
            if size >= chips:
                return name
        most = self.topologies[-1][0]
        raise InputError(f"tp is {chips}: at most {most} chips of {self.name} are compiled for; lower tp")


CHIPS = (
    Chip(
        name="v5p",
        hbm_bytes=95 * GIB,
        hbm_bytes_per_second=2765 * GIGA,
        flops_per_second=459 * TERA,
        clock_hz=1.75 * GIGA,
        ici_bytes_per_second=1200 * GIGA,
        topologies=((1, "v5p:1x1x1"), (2, "v5p:1x2x1"), (4, "v5p:2x2x1"), (8, "v5p:2x2x2")),
    ),
    Chip(
        name="v6e",
        hbm_bytes=32 * GIGA,
        hbm_bytes_per_second=1640 * GIGA,
        flops_per_second=918 * TERA,
        clock_hz=1.75 * GIGA,
        ici_bytes_per_second=800 * GIGA,
        topologies=((1, "v6e:1x1"), (2, "v6e:1x2"), (4, "v6e:2x2"), (8, "v6e:2x4")),
    ),
    Chip(
        name="v5e",
        hbm_bytes=16 * GIGA,
        hbm_bytes_per_second=819 * GIGA,
        flops_per_second=197 * TERA,
        clock_hz=1.5 * GIGA,
        ici_bytes_per_second=400 * GIGA,
        topologies=((1, "v5e:1x1"), (2, "v5e:1x2"), (4, "v5e:2x2"), (8, "v5e:2x4")),
    ),
)


def chip_named(name: str) -> Chip:
    """The chip called `name`, in any case. Raises InputError."""
    for chip in CHIPS:
        if chip.name == name.strip().lower():
            return chip
    raise InputError(f"chip is {name!r}: use one of {', '.join(chip.name for chip in CHIPS)}")
