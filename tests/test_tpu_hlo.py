"""Facts of compiled programs: from texts of real ones (tests/hlo, made by tpu_programs.py), from texts by hand, and,
where libtpu is installed, from the compiler itself."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tpu_programs import QUIET

from torch_dflash.tpu.hlo import Collective, Facts, facts_from, walk
from torch_dflash.tpu.hlo_text import Array, parse

HERE = Path(__file__).parent
LOCK = Path("/tmp/aot.lock")  # whoever compiles for TPU on this machine takes it
NAMES = ("loop", "write", "copy", "kernel", "branch", "shared", "show")
MATRIX = 1024 * 1024  # elements of the programs' square matrices
MIB = 2**20
NO_MEMORY = SimpleNamespace(
    argument_size_in_bytes=1, output_size_in_bytes=2, alias_size_in_bytes=3, temp_size_in_bytes=4
)


def text_of(name: str) -> str:
    return (HERE / "hlo" / f"{name}.txt").read_text()


def facts(text: str, large: int = MIB) -> Facts:
    return facts_from(text, NO_MEMORY, large)


def entry(*body: str, before: str = "") -> str:
    """A program by hand."""
    lines = "\n".join(f"  {line}" for line in body)
    return f"HloModule by_hand\n{before}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{lines}\n}}\n"


def test_a_scan_counts_as_often_as_it_runs_and_a_loop_of_unknown_length_once() -> None:
    text = text_of("loop")
    found = facts(text)
    assert found.loops_counted_once == 1
    assert found.flops == 6 * 2 * 16 * MATRIX
    assert found.hbm_bytes == pytest.approx(6 * 2 * MATRIX, rel=0.01)  # six matrices in bfloat16
    inner = [visit for visit in walk(parse(text)) if visit.times == 6]
    per_layer = sum(visit.instruction.number("estimated_cycles") or 0 for visit in inner)
    assert per_layer > 5000 and found.cycles == pytest.approx(6 * per_layer, rel=0.01)
    assert found.seconds(2e9) == found.cycles / 2e9


def test_a_trip_count_that_the_compiler_states_is_taken() -> None:
    text = text_of("loop")
    assert text.count("constant(6)") == 1  # the scan's limit
    unknown = text.replace("constant(6)", "constant(-6)")
    assert facts(unknown).loops_counted_once == 2 and facts(unknown).flops == 2 * 16 * MATRIX
    (scan,) = (
        visit.instruction for visit in walk(parse(text)) if visit.instruction.opcode == "while" and visit.in_loop
    )
    line = next(line for line in text.splitlines() if line.lstrip().startswith(f"%{scan.name} = "))
    stated = unknown.replace(line, f'{line}, backend_config={{"known_trip_count":{{"n":"3"}}}}')
    assert facts(stated).loops_counted_once == 1 and facts(stated).flops == 3 * 2 * 16 * MATRIX


def test_an_update_in_place_touches_only_what_it_writes() -> None:
    found = facts(text_of("write"))
    rows = 16 * 8 * 128 * 2
    assert found.hbm_bytes == 2 * rows + 16 * 4  # the new rows read and written, and their places
    assert found.large_copies == () and found.mosaic_calls == 0 and found.host_transfers == ()


def test_without_donation_the_pool_is_copied_and_that_is_seen() -> None:
    pool = 4096 * 8 * 128 * 2
    found = facts(text_of("copy"), large=pool)
    (copy,) = found.large_copies
    assert (copy.opcode, copy.bytes, copy.in_loop) == ("copy", pool, False)
    assert 2 * pool < found.hbm_bytes < 2.02 * pool
    assert facts(text_of("copy"), large=pool + 1).large_copies == ()


def test_a_mosaic_call_counts_what_its_author_says() -> None:
    found = facts(text_of("kernel"))
    assert (found.mosaic_calls, found.flops, found.hbm_bytes, found.cycles) == (1, 1000, 5000, 0)
    assert found.silent_mosaic_calls == 0


def test_a_mosaic_call_that_says_nothing_counts_all_but_its_pages() -> None:
    text = entry(
        "%pages = bf16[100,64,16,128]{3,2,1,0} parameter(0)",
        "%q = bf16[16,32,128]{2,1,0} parameter(1)",
        "%table = s32[10]{0:T(128)S(1)} parameter(2)",
        'ROOT %k = bf16[16,32,128]{2,1,0} custom-call(%table, %q, %pages), custom_call_target="tpu_custom_call"',
    )
    assert facts(text).hbm_bytes == 2 * 16 * 32 * 128 * 2
    assert facts(text).mosaic_calls == facts(text).silent_mosaic_calls == 1


def test_of_two_branches_the_costlier_counts() -> None:
    found = facts(text_of("branch"))
    assert found.flops == 2 * 2 * 16 * MATRIX  # two products, not three
    assert found.hbm_bytes == pytest.approx(2 * 2 * MATRIX, rel=0.03)
    times = {visit.times for visit in walk(parse(text_of("branch")))}
    assert times == {0, 1}


def test_collectives_are_counted_with_their_bytes() -> None:
    assert facts(text_of("shared")).collectives == (Collective("all-reduce", 1, 1, 16 * 1024 * 2),)
    assert facts(text_of("write")).collectives == ()


def while_of(trips: int, name: str, body: str, compare: str = "direction=LT") -> str:
    """The computations of a loop by hand: c_`name` and b_`name`, which is handed %x, f32[8]."""
    return (
        f"%c_{name} (c: (s32[], f32[8])) -> pred[] {{\n"
        "  %c = (s32[], f32[8]) parameter(0)\n"
        "  %i = s32[]{:T(128)S(6)} get-tuple-element(%c), index=0\n"
        f"  %n = s32[]{{:T(128)S(6)}} constant({trips})\n"
        f"  ROOT %lt = pred[]{{:T(512)S(6)}} compare(%i, %n), {compare}\n"
        "}\n"
        f"%b_{name} (c: (s32[], f32[8])) -> (s32[], f32[8]) {{\n"
        "  %t = (s32[], f32[8]) parameter(0)\n"
        "  %x = f32[8]{0} get-tuple-element(%t), index=1\n"
        f"{body}\n"
        "}\n"
    )


def looped(*computations: str, name: str) -> Facts:
    line = f"ROOT %w = (s32[], f32[8]) while(%t), condition=%c_{name}, body=%b_{name}"
    return facts(entry("%t = (s32[], f32[8]) parameter(0)", line, before="".join(computations)))


GATHER = "  %s = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), dimensions={0}\n  %d = f32[32]{0} all-gather-done(%s)"


def test_collectives_in_a_loop_run_as_often_as_it_does() -> None:
    found = looped(while_of(5, "a", f"{GATHER}\n  %o = token[] outfeed(%x, %t)"), name="a")
    assert found.collectives == (Collective("all-gather", 1, 5, 5 * 32 * 4),)
    gathered, fed_out = (8 + 32) * 4, 8 * 4
    assert found.hbm_bytes == 5 * (gathered + fed_out)
    (out,) = found.host_transfers
    assert (out.name, out.opcode, out.in_loop) == ("o", "outfeed", True)
    assert found.loops_counted_once == 0


def test_a_loop_in_a_loop_multiplies() -> None:
    outer = "  %w.1 = (s32[], f32[8]) while(%t), condition=%c_in, body=%b_in"
    found = looped(while_of(5, "in", GATHER), while_of(3, "out", outer), name="out")
    assert found.collectives == (Collective("all-gather", 1, 15, 15 * 32 * 4),)


@pytest.mark.parametrize("compare", ["direction=GT", "direction=NE"])
def test_a_loop_that_counts_otherwise_is_of_unknown_length(compare: str) -> None:
    found = looped(while_of(5, "a", GATHER, compare), name="a")
    assert found.loops_counted_once == 1 and found.collectives[0].runs == 1


def test_a_prefetch_onto_the_chip_is_read_once() -> None:
    text = entry(
        "%p = f32[256,1024]{1,0} parameter(0)",
        "%s = (f32[256,1024]{1,0:T(8,128)S(1)}, f32[256,1024]{1,0}, u32[]{:S(2)}) copy-start(%p)",
        "%d = f32[256,1024]{1,0:T(8,128)S(1)} copy-done(%s)",
        "ROOT %r = f32[256,1024]{1,0:T(8,128)S(1)} negate(%d)",
    )
    assert facts(text).hbm_bytes == MIB and facts(text).large_copies == ()
    within = text.replace("(f32[256,1024]{1,0:T(8,128)S(1)}, f32", "(f32[256,1024]{1,0}, f32")
    assert facts(within).hbm_bytes == 2 * MIB and len(facts(within).large_copies) == 1


def test_a_mosaic_call_that_updates_a_pool_in_place_does_not_copy_it() -> None:
    call = 'ROOT %k = f32[256,1024]{1,0} custom-call(%p), custom_call_target="tpu_custom_call"'
    text = entry("%p = f32[256,1024]{1,0} parameter(0)", call)
    assert [found.bytes for found in facts(text).large_copies] == [MIB]
    assert facts(text.replace(call, f"{call}, output_to_operand_aliasing={{{{}}: (0, {{}})}}")).large_copies == ()


def test_host_transfers_are_found_once_each() -> None:
    assert [found.opcode for found in facts(text_of("show")).host_transfers] == ["send", "recv"]
    moved = "ROOT %out = (f32[4]{0:S(5)}, f32[4]{0}, u32[]) copy-start(%p)"
    (found,) = facts(entry("%p = f32[4]{0} parameter(0)", moved)).host_transfers
    assert (found.name, found.bytes) == ("out", 16)
    called = 'ROOT %c = f32[4]{0} custom-call(%p), custom_call_target="xla_ffi_python_callback"'
    assert len(facts(entry("%p = f32[4]{0} parameter(0)", called)).host_transfers) == 1


def test_a_pool_rewritten_by_a_fusion_is_a_copy_too() -> None:
    fused = (
        "%f (a: f32[1024,1024]) -> f32[1024,1024] {\n"
        "  %a = f32[1024,1024]{1,0} parameter(0)\n"
        "  ROOT %n = f32[1024,1024]{1,0} negate(%a)\n"
        "}\n"
    )
    pool = "%p = f32[1024,1024]{1,0} parameter(0)"
    text = entry(pool, "ROOT %r = f32[1024,1024]{1,0} fusion(%p), kind=kLoop, calls=%f", before=fused)
    assert [(found.name, found.bytes) for found in facts(text).large_copies] == [("r", 4 * MATRIX)]
    on_chip = text.replace("ROOT %r = f32[1024,1024]{1,0}", "ROOT %r = f32[1024,1024]{1,0:T(8,128)S(1)}")
    assert facts(on_chip).large_copies == ()


def test_a_fusion_that_slices_reads_the_slice_and_one_that_updates_writes_the_update() -> None:
    fused = (
        "%f (w: f32[36,64,64], u: f32[64], pool: f32[500,64]) -> (f32[64,64], f32[500,64]) {\n"
        "  %w = f32[36,64,64]{2,1,0} parameter(0)\n"
        "  %i = s32[] constant(3)\n"
        "  %s = f32[1,64,64]{2,1,0} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,64,64}\n"
        "  %b = f32[64,64]{1,0} bitcast(%s)\n"
        "  %u = f32[64]{0} parameter(1)\n"
        "  %row = f32[1,64]{1,0} bitcast(%u)\n"
        "  %pool = f32[500,64]{1,0} parameter(2)\n"
        "  %put = f32[500,64]{1,0} dynamic-update-slice(%pool, %row, %i, %i)\n"
        "  ROOT %t = (f32[64,64], f32[500,64]) tuple(%b, %put)\n"
        "}\n"
    )
    text = entry(
        "%w.1 = f32[36,64,64]{2,1,0} parameter(0)",
        "%u.1 = f32[64]{0} parameter(1)",
        "%p = f32[500,64]{1,0} parameter(2)",
        "ROOT %r = (f32[64,64]{1,0}, f32[500,64]{1,0}) fusion(%w.1, %u.1, %p), kind=kLoop, calls=%f",
        before=fused,
    )
    assert facts(text).hbm_bytes == 4 * (64 * 64 + 64 + 64 * 64 + 64)


@pytest.mark.parametrize(
    ("line", "terms"),
    [
        ("dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 4),
        ("convolution(%a, %b), dim_labels=bf_io->bf", 4),
        ("convolution(%a, %c), window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf", 4),
        ("convolution(%a, %c), window={size=3}, dim_labels=0bf_0io->0bf", 12),
    ],
)
def test_operations_of_matrix_products(line: str, terms: int) -> None:
    text = entry(
        "%a = f32[2,4]{1,0} parameter(0)",
        "%b = f32[4,6]{1,0} parameter(1)",
        "%c = f32[3,4,6]{1,0} parameter(2)",
        f"ROOT %r = f32[2,6]{{1,0}} {line}",
    )
    assert facts(text).flops == 2 * terms * 2 * 6


def test_an_asynchronous_wrapper_is_looked_into() -> None:
    wrapped = (
        "%async (a: f32[64]) -> f32[8] {\n"
        "  %a = f32[64]{0} parameter(0)\n"
        "  ROOT %s = f32[8]{0} slice(%a), slice={[0:8]}\n"
        "}\n"
    )
    text = entry(
        "%p = f32[64]{0} parameter(0)",
        "%st = ((f32[64]{0}), f32[8]{0}, s32[]) async-start(%p), calls=%async",
        "ROOT %d = f32[8]{0} async-done(%st)",
        before=wrapped,
    )
    assert facts(text).hbm_bytes == 2 * 8 * 4


def test_types_of_arrays() -> None:
    text = entry(
        "%p = (f32[4]{0:T(128)}, /*index=1*/bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, pred[], s4[5], token[]) parameter(0)",
        "ROOT %g = s32[<=7]{0} get-tuple-element(%p), index=0",
    )
    first, last = parse(text).computations["main"].instructions
    assert first.outputs == (
        *(Array("f32", (4,), 0), Array("bf16", (2, 3), 1), Array("pred", (), 0), Array("s4", (5,), 0)),
        Array("token", (), 0),
    )
    assert [array.bytes for array in first.outputs] == [16, 12, 1, 3, 0]
    assert first.outputs[1].hbm_bytes == 0 and last.outputs == (Array("s32", (7,), 0),)


def test_sizes_are_the_compilers() -> None:
    found = facts(text_of("write"))
    assert (found.argument_bytes, found.output_bytes, found.alias_bytes, found.temp_bytes) == (1, 2, 3, 4)


@pytest.mark.parametrize("text", ["", "no HLO at all\n", "HloModule x\n%f () -> f32[] {\n}\n"])
def test_what_is_no_program(text: str) -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        facts(text)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the compiler says today, from a process of its own."""
    pytest.importorskip("libtpu")
    out = tmp_path_factory.mktemp("tpu") / "programs.json"
    command = [sys.executable, "-W", "ignore", str(HERE / "tpu_programs.py"), str(out)]
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, env=os.environ | QUIET, capture_output=True, timeout=240)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_compiler_still_writes_what_is_read_here(name: str, compiled: dict[str, Any]) -> None:
    program = compiled[name]
    now, then = facts_from(program["text"], SimpleNamespace(**program), MIB), facts(text_of(name))
    assert (now.mosaic_calls, now.collectives, now.flops) == (then.mosaic_calls, then.collectives, then.flops)
    assert now.hbm_bytes == pytest.approx(then.hbm_bytes, rel=0.05)
    assert (now.cycles > 0) == (then.cycles > 0) and now.loops_counted_once == then.loops_counted_once
    assert len(now.large_copies) == len(then.large_copies) and len(now.host_transfers) == len(then.host_transfers)
    donated = 4096 * 8 * 128 * 2 if name == "write" else 0
    assert now.alias_bytes == donated
