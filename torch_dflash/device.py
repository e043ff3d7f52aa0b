"""The decoding state on the device, and the two programs that move it on.

Letters: R rows, r rows of one dispatch, T tokens of a prompt chunk.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from torch_dflash.decode import decode_program, make_state, prefill_program, state_shapes
from torch_dflash.memory import check_fits, plan_memory
from torch_dflash.options import NOTHING, Choice, row_options
from torch_dflash.pair import Pair, timed
from torch_dflash.propose import Proposer
from torch_dflash.sampling import Choose, RowOptions, choose
from torch_dflash.state import Capacity, Chunk, Round, Until

log = logging.getLogger("torch_dflash")


class Device:
    """Holds the state of R rows. Raises InputError when the device's memory cannot hold the capacity.

    proposers: all that a dispatch may use, the one with most drafts first. choose: how tokens are chosen. max_steps: of
    one dispatch. The numbers of stop and biased ids are shapes of the programs; they only grow, to powers of two.
    """

    def __init__(
        self,
        pair: Pair,
        proposers: Sequence[Proposer],
        capacity: Capacity,
        max_steps: int,
        choose: Choose = choose,
    ) -> None:
        self.pair = pair
        self.proposers = proposers
        self.choose = choose
        self.capacity = capacity
        self.max_steps = max_steps
        self.num_stop_ids = 1
        self.num_biased = 1
        assert capacity.groups == pair.target.platform.data, "each data-parallel device has a group of rows"
        shapes = state_shapes(pair.target, proposers[0], capacity, pair.dtype)
        log.info("%s", check_fits(plan_memory(pair.params, shapes), capacity))
        self.state = make_state(pair.target, proposers[0], capacity, pair.dtype)

    def prefill(
        self, row: int, table: np.ndarray, choice: Choice, prompt: Sequence[int], start: int, chunk: Chunk
    ) -> tuple[jax.Array, jax.Array]:
        """Process a chunk of one row's prompt at positions start..; the row R stands for none. Does not wait. Returns
        the token behind the chunk and its log-probability, both [groups]: the row group's counts."""
        groups, history = self.capacity.groups, np.zeros((1, self.capacity.slots_per_row), np.int32)
        history[0, : len(prompt)] = prompt
        own = self.capacity.group_of(row)  # the other groups have nothing to do

        def alone(value: np.ndarray, nothing: int = 0) -> np.ndarray:
            every = np.full((groups, *value.shape[1:]), nothing, value.dtype)
            every[own] = value[0]
            return every

        self.state, token, logprob = prefill_program()(
            self.pair.target,
            self.proposers[0],
            self.choose,
            self.pair.params,
            self.state,
            alone(np.array([row], np.int32), nothing=self.capacity.rows),
            alone(table),
            self._options([choice if group == own else NOTHING for group in range(groups)]),
            alone(history),
            alone(np.array([start], np.int32)),
            jax.tree.map(alone, chunk),
        )
        return token, logprob

    def decode(
        self, rows: Sequence[int], tables: np.ndarray, choices: Sequence[Choice], proposer: Proposer, until: Until
    ) -> tuple[Round, int]:
        """Rounds of `rows`, a row R standing for none, at most max_steps; waits for the result. Returns the rounds,
        fields [max_steps,r,...], and their count."""
        self.state, rounds, count = decode_program(self.pair.target.platform)(
            self.pair.target,
            proposer,
            self.choose,
            self.max_steps,
            self.pair.params,
            self.state,
            np.array(rows, np.int32),
            tables,
            self._options(choices),
            jax.tree.map(np.int32, until),
        )
        rounds, count = jax.device_get((rounds, count))
        return rounds, int(count)

    def wait(self) -> None:
        """Until all that was sent before is done."""
        jax.block_until_ready(self.state)

    def _options(self, choices: Sequence[Choice]) -> RowOptions:
        return row_options(choices, self.num_stop_ids, self.num_biased)

    def warm_up_prefill(self, width: int) -> None:
        """Compile what prefills chunks of `width` tokens, unless the pair has it. No row is written."""
        none = np.zeros(1, np.int32)
        chunk = Chunk(np.zeros((1, width), np.int32), none, none)
        run = partial(self.prefill, self.capacity.rows, self._no_tables(1), NOTHING, (), 0, chunk)
        self._compile(("prefill", width, self.proposers[0]), f"prefill of {width} tokens", run)

    def warm_up_decode(self, rows: int) -> None:
        """Compile the dispatches of `rows` rows, one for each proposer, and take a step of no row: the first one of a
        program makes its kernels (XLA on CPU)."""
        for proposer in self.proposers:
            nobody = [self.capacity.rows] * rows
            run = partial(self.decode, nobody, self._no_tables(rows), [NOTHING] * rows, proposer, Until(1, 1))
            shown = f"decode of {rows} row(s), {proposer.num_drafts} draft(s)"
            self._compile(("decode", rows, self.max_steps, proposer), shown, run)

    def _no_tables(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.capacity.pages_per_row), np.int32)

    def _compile(self, program: tuple, shown: str, run: Callable[[], object]) -> None:
        shapes = (*program, self.choose, self.capacity, self.num_stop_ids, self.num_biased)
        if shapes not in self.pair.compiled:
            with timed(f"compile {shown}"):
                jax.block_until_ready(run())
            self.pair.compiled.add(shapes)
