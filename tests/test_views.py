"""The crossing: lowered functions compute what the eager modules compute, in the same memory and dtypes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import Loaded, golden, load, prompt_of, write_drafter, write_target
from torch import Tensor

from bridge.views import linear, lower, take_params, take_rows, to_jax
from torch_dflash.pair import load_drafter, load_target

TOLERANCE = 2e-5
ROWS, WIDTH = 2, 5


def positions() -> np.ndarray:
    return np.array([[0], [37]], np.int32) + np.arange(WIDTH, dtype=np.int32)


def hidden(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH, size)).astype(np.float32)


def mean_torch(layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Stands for attention: all heads and layers matter, and the cache goes through."""
    mixed = (k + v).mean(2, keepdim=True).cumsum(1) * (layer + 1) / 4
    return (q * 0.5 + mixed), cache + 1


def mean_jax(layer: Any, q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, Any]:
    mixed = jnp.cumsum((k + v).mean(2, keepdims=True), 1) * (layer + 1) / 4
    return (q * 0.5 + mixed).astype(q.dtype), cache + 1


@pytest.fixture(scope="module", params=["qwen3-gqa", "qwen3-untied", "llama3-rope"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return load(golden(request.param))


def close(lowered: Any, eager: Tensor) -> None:
    scale = max(1.0, eager.abs().max().item())
    np.testing.assert_allclose(np.asarray(lowered), eager.detach().numpy(), rtol=0, atol=TOLERANCE * scale)


def test_lowered_target_equals_eager(loaded: Loaded) -> None:
    functions, params = loaded.pair.target, loaded.pair.params["target"]
    ids = np.array([prompt_of(WIDTH, 256), prompt_of(WIDTH, 256, seed=1)], np.int32)
    taps = (3, 0, 5)
    forward = jax.jit(lambda p, *args: functions.forward(p, args[0], args[1], taps, mean_jax, jnp.float32(0)))
    out = forward(params, ids, positions())
    expected = loaded.target(torch.tensor(ids), torch.tensor(positions()), taps, mean_torch, torch.zeros(()))
    for ours, theirs in zip(out, expected, strict=True):
        close(ours, theirs)
    assert int(out[2]) == functions.config.num_layers
    embedded, logits = jax.jit(lambda p, i, h: (functions.embed(p, i), functions.logits(p, h)))(params, ids, out[0])
    close(embedded, loaded.target.embed(torch.tensor(ids)))
    close(logits, loaded.target.logits(expected[0]))


def test_lowered_drafter_equals_eager(loaded: Loaded) -> None:
    functions, params = loaded.pair.drafter, loaded.pair.params["drafter"]
    assert functions is not None
    features, noise = hidden(loaded.drafter.fc.in_features), hidden(64)
    keys, values = jax.jit(functions.absorb)(params, features, positions())
    for ours, theirs in zip(
        (keys, values), loaded.drafter.absorb(torch.tensor(features), torch.tensor(positions())), strict=True
    ):
        close(ours, theirs)
    forward = jax.jit(lambda p, n, at: functions.forward(p, n, at, mean_jax, jnp.float32(0)))
    expected = loaded.drafter(torch.tensor(noise), torch.tensor(positions()), mean_torch, torch.zeros(()))
    close(forward(params, noise, positions()), expected)
    close(jax.jit(lower(loaded.drafter, "project"))(params, features), loaded.drafter.project(torch.tensor(features)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_tensor_crosses_without_a_copy(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.shape == (4, 6)
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    assert np.asarray(array).astype(int).tolist() == tensor.int().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_cross_without_a_copy_and_leave_a_skeleton(dtype: torch.dtype) -> None:
    _, module = load_target(golden("qwen3-gqa") / "target", dtype)
    before = {name: tensor.data_ptr() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    params = take_params(module)
    assert {name: array.unsafe_buffer_pointer() for name, array in params.items()} == before
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize(("tied", "names"), [(True, 0), (False, 1)])
def test_a_tied_head_crosses_once(tied: bool, names: int, tmp_path: Path) -> None:
    _, module = load_target(write_target(tmp_path, tie_word_embeddings=tied), torch.float32)
    params = take_params(module)
    assert sum(name.startswith("lm_head") for name in params) == names
    assert len({array.unsafe_buffer_pointer() for array in params.values()}) == len(params)


def test_parameters_must_be_the_modules_own(tiny: Loaded) -> None:
    params = tiny.pair.params["target"]
    missing = {name: array for name, array in params.items() if name != "norm.weight"}
    for wrong, name in ((missing, "norm.weight"), (params | {"lm_head.bias": params["norm.weight"]}, "lm_head.bias")):
        with pytest.raises(KeyError, match=name):
            tiny.pair.target.embed(wrong, np.zeros((1, 2), np.int32))


def walk(jaxpr: Any) -> Iterator[str]:
    """The dtypes of everything a program computes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (str(var.aval.dtype) for var in equation.outvars if hasattr(var.aval, "dtype"))
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda part: hasattr(part, "eqns")):
            if hasattr(inner, "eqns"):
                yield from walk(getattr(inner, "jaxpr", inner))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("half")
    write_target(folder / "target")
    write_drafter(folder / "draft")
    return load(folder, dtype="bfloat16")


def test_dtypes_stay_what_they_are(half: Loaded) -> None:
    """bf16 in, bf16 out, with float32 inside norms and rotations only; never 64 bits. inv_freq is float32 still."""
    functions, params = half.pair.target, half.pair.params["target"]
    drafter = half.pair.drafter
    assert drafter is not None
    for own in half.pair.params.values():
        assert {str(array.dtype) for name, array in own.items() if name != "rotary.inv_freq"} == {"bfloat16"}
        assert own["rotary.inv_freq"].dtype == jnp.float32

    def everything(params: Any, own: Any, ids: Any, at: Any) -> Any:
        normed, features, _ = functions.forward(params, ids, at, (1, 0), mean_jax, jnp.int32(0))
        keys, values = drafter.absorb(own, features, at)
        block = drafter.forward(own, functions.embed(params, ids), at, mean_jax, jnp.int32(0))
        return normed, features, keys, values, block, functions.logits(params, block)

    arguments = (params, half.pair.params["drafter"], np.ones((ROWS, WIDTH), np.int32), positions())
    traced = jax.make_jaxpr(everything)(*arguments)
    assert {str(aval.dtype) for aval in traced.out_avals} == {"bfloat16"}
    dtypes = set(walk(traced.jaxpr))
    assert {"bfloat16", "float32", "int32"} <= dtypes
    assert not {name for name in dtypes if name.endswith("64")}


def test_bf16_modules_agree_with_eager(half: Loaded) -> None:
    _, eager = load_drafter(half.folder / "draft", torch.bfloat16)
    features = hidden(64)
    drafter = half.pair.drafter
    assert drafter is not None
    keys, _ = jax.jit(drafter.absorb)(half.pair.params["drafter"], jnp.array(features, jnp.bfloat16), positions())
    expected, _ = eager.absorb(torch.tensor(features).bfloat16(), torch.tensor(positions()))
    np.testing.assert_allclose(np.asarray(keys, np.float32), expected.float().numpy(), atol=0.05)


def test_rows_and_products_equal_the_obvious() -> None:
    random = np.random.default_rng(1)
    table, ids = random.normal(size=(7, 3)).astype(jnp.bfloat16), np.array([[6, 0], [3, 3]])
    assert (np.asarray(take_rows(jnp.array(table), jnp.array(ids))) == table[ids]).all()
    for rows in (1, 2, 5):
        x, weight = (random.normal(size=shape).astype(jnp.bfloat16) for shape in ((rows, 3), (4, 3)))
        out = linear(jnp.array(x), jnp.array(weight), jnp.ones(4, jnp.bfloat16))
        expected = x.astype(np.float32) @ weight.astype(np.float32).T + 1
        assert out.shape == (rows, 4)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2e-2, atol=2e-2)


def test_torch_is_left_as_it_was() -> None:
    """Importing torchax must not make "jax" torch's accelerator: that breaks torch.compile and fork_rng."""
    assert not torch.accelerator.is_available()
    with torch.random.fork_rng():
        torch.manual_seed(5)
    code = "import bridge.views, torch; print(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[2.0, 2.0]"), done.stderr


def test_a_torchax_that_does_not_fit_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "torchax").mkdir()
    (tmp_path / "torchax" / "__init__.py").write_text("import torch\ntorch.ops.aten.no_such_overload_here\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from torch_dflash import load_pair"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: torchax does not import beside these versions: torch 2.")
    assert "install torch==" in last
