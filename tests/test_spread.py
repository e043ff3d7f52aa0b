"""Several devices: the same tokens and proposals on every mesh. Fake CPU devices, in a process of their own."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import Loaded, second, write_drafter, write_target

from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.errors import InputError
from torch_dflash.likeliest import GROUP, group_size
from torch_dflash.sharding import axes_of, check_divides, platform_over


@pytest.fixture(scope="module")
def lines(tiny: Loaded, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What tests/spread_decoding.py found, for a pair and one with a DFlash 2 drafter."""
    folder = tmp_path_factory.mktemp("spread") / "dflash2"
    write_target(folder / "target")
    write_drafter(folder / "draft", **second())
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 " + os.environ.get("XLA_FLAGS", ""),
        "JAX_PLATFORMS": "cpu",
    }
    script = Path(__file__).parent / "spread_decoding.py"
    command = [sys.executable, script, tiny.folder, folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def outcomes(lines: list[dict[str, Any]]) -> dict[tuple[int, int, str], dict[str, Any]]:
    """Of the first pair, by data, model and method."""
    own = [entry for entry in lines[:-1] if entry["pair"] != "dflash2"]
    return {(entry["data"], entry["model"], entry["method"]): entry for entry in own}


def test_a_dflash_2_drafter_drafts_alike_on_a_mesh(lines: list[dict[str, Any]]) -> None:
    alone, spread = (entry["texts"] for entry in lines[:-1] if entry["pair"] == "dflash2")
    assert all(len(tokens) == 16 for tokens, _ in alone)
    assert alone == spread


def test_a_shared_vocabulary_is_not_gathered(lines: list[dict[str, Any]]) -> None:
    """To find the candidates of a position: only the maxima of groups are."""
    assert lines[-1].keys() == {"49152", "151936", "128256"}
    for vocab_size, most in lines[-1].items():
        assert 0 < most <= 7 * max(int(vocab_size) // group_size(int(vocab_size), 4), 16 * GROUP), vocab_size


@pytest.mark.parametrize(("method", "meshes"), [("dflash", 4), ("plain", 2)])
def test_tokens_and_proposals_are_the_same_on_every_mesh(outcomes: dict, method: str, meshes: int) -> None:
    alone = outcomes[1, 1, method]["texts"]
    assert all(len(tokens) == 16 for tokens, _ in alone)
    others = [entry["texts"] for (_, _, used), entry in outcomes.items() if used == method]
    assert len(others) == meshes
    assert all(texts == alone for texts in others)


def test_weights_lie_by_head_width_and_vocabulary_and_pages_by_rows_and_heads(outcomes: dict) -> None:
    held, pool = outcomes[2, 2, "dflash"]["weights"], outcomes[2, 2, "dflash"]["pool"]
    assert held["layers.self_attn.q_proj.weight.T"] == held["layers.mlp.down_proj.weight.T"] == 2
    assert held["embed_tokens.weight"] == held["lm_head.weight.T"] == 2
    assert held["norm.weight"] == held["layers.input_layernorm.weight"] == 1
    assert pool == 4
    assert outcomes[1, 2, "dflash"]["pool"] == outcomes[2, 1, "dflash"]["pool"] == 2


@pytest.mark.parametrize(
    ("name", "num_axes", "axes"),
    [
        ("layers.0.mlp.up_proj.weight", 2, ("model", None)),
        ("layers.mlp.up_proj.weight", 3, (None, "model", None)),
        ("layers.mlp.up_proj.weight.T", 3, (None, None, "model")),
        ("fc.weight.T", 2, ("model", None)),
        ("layers.self_attn.o_proj.weight", 3, (None, None, "model")),
        ("layers.self_attn.o_proj.bias", 2, (None, None)),
        ("layers.self_attn.k_proj.bias", 2, (None, "model")),
        ("layers.self_attn.k_norm.weight", 2, (None, None)),
        ("fc.weight", 2, (None, "model")),
        ("embed_tokens.weight", 2, ("model", None)),
        ("rotary.inv_freq", 1, (None,)),
        ("d2t", 1, (None,)),
    ],
)
def test_axes(name: str, num_axes: int, axes: tuple) -> None:
    assert axes_of(name, num_axes) == axes


def test_what_does_not_divide_is_refused_by_name(tiny: Loaded) -> None:
    target, draft = read_target_config(tiny.folder / "target"), read_drafter_config(tiny.folder / "draft")
    check_divides(target, draft, 2)
    with pytest.raises(
        InputError, match="tp is 4, which does not divide the target's num_key_value_heads 2: use 2 or 1"
    ):
        check_divides(target, draft, 4)
    with pytest.raises(InputError, match="tp is 3, which does not divide the target's num_key_value_heads 2: use"):
        check_divides(target, None, 3)


def test_more_devices_than_there_are_and_none_are_refused() -> None:
    with pytest.raises(InputError, match="tp 8 times dp 2 needs 16 devices, and JAX has 1: lower tp or dp"):
        platform_over(8, 2)
    with pytest.raises(InputError, match="dp is 0: use an integer >= 1"):
        platform_over(1, 0)


HOST = """
import sys, jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from torch_dflash import cli
sys.exit(cli.main(["generate", "x", "--target", "bytes"]))
"""


def test_several_hosts_are_refused_in_one_line() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, "-c", HOST, address, str(number)] for number in range(2)]
    hosts = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for command in commands]
    for host in hosts:
        _, said = host.communicate(timeout=120)
        assert host.returncode == 2
        assert said.splitlines()[-1].endswith(
            "JAX runs as 2 processes: one process must see all devices, start one host"
        )
