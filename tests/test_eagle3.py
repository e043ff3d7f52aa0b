"""The EAGLE-3 baseline: the public layout, the eager oracle, exact output, prefix pages that know the token behind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TARGET, Loaded, prompt_of, write_target
from safetensors.torch import save_file

from bridge.pages import PageAllocator
from torch_dflash import Pair, Sampling, generate, load_pair, make_request
from torch_dflash.config_eagle import read_eagle3_config
from torch_dflash.config_reader import read_target_config
from torch_dflash.device import Device
from torch_dflash.engine import Engine
from torch_dflash.errors import InputError
from torch_dflash.metrics import TraceEntry
from torch_dflash.models.eagle3 import Eagle3
from torch_dflash.pace import Steady
from torch_dflash.pair import load_eagle3, load_target
from torch_dflash.reference_eagle import eagle3
from torch_dflash.sampling import choose_greedily
from torch_dflash.state import Capacity
from torch_dflash.tpu.shapes import target_folder

# yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: its public config, and the names of its tensors by EAGLE's public code.
PUBLIC = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
PUBLIC_SHAPES = {
    "d2t": (32000,),
    "fc.weight": (4096, 12288),
    "lm_head.weight": (32000, 4096),
    "norm.weight": (4096,),
    "midlayer.hidden_norm.weight": (4096,),
    "midlayer.input_layernorm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,),
    "midlayer.self_attn.q_proj.weight": (4096, 8192),
    "midlayer.self_attn.k_proj.weight": (1024, 8192),
    "midlayer.self_attn.v_proj.weight": (1024, 8192),
    "midlayer.self_attn.o_proj.weight": (4096, 4096),
    "midlayer.mlp.gate_proj.weight": (14336, 4096),
    "midlayer.mlp.up_proj.weight": (14336, 4096),
    "midlayer.mlp.down_proj.weight": (4096, 14336),
}
DEPTH, ROWS_OF_HEAD = 8, 9
OWN = {name: TARGET[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
TINY = PUBLIC | OWN | {"num_key_value_heads": 2, "vocab_size": 12, "draft_vocab_size": ROWS_OF_HEAD}


def write_head(folder: Path, seed: int = 10, **changes: Any) -> Path:
    """A random head for a tiny target of eight layers, with the mask t2d beside it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    config = read_eagle3_config(folder, read_target_config(folder.parent / "target"))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in Eagle3(config).state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if tensor.ndim == 1 else noise * 2 / tensor.shape[-1] ** 0.5
    tensors["d2t"] = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3])  # rows stand for 0 1 3 4 5 7 8 10 11
    tensors["t2d"] = torch.ones(12, dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("eagle")
    write_target(made / "target", num_hidden_layers=DEPTH)
    write_head(made / "head")
    return made


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load_pair(folder / "target", folder / "head")


def test_the_public_layout(tmp_path: Path) -> None:
    """Names and shapes of the 8B head, and the taps of EAGLE's code: what layers 2, 16 and 29 read."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC))
    config = read_eagle3_config(tmp_path, read_target_config(target_folder("Llama-3.1-8B")))
    assert config.target_layer_ids == (1, 15, 28)
    with torch.device("meta"):
        module = Eagle3(config)
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == PUBLIC_SHAPES


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_proposals_are_the_oracles_and_output_is_the_targets(folder: Path, pair: Pair, num_drafts: int) -> None:
    config, target = load_target(folder / "target", torch.float32)
    head_config, head = load_eagle3(folder / "head", config, torch.float32)
    prompts = [prompt_of(length) for length in (5, 70, 23)]
    results = generate(pair, prompts, 24, num_drafts=num_drafts, trace=True, ignore_eos=True)
    plain = generate(pair, prompts, 24, method="plain", ignore_eos=True)
    kept = 0
    for prompt, result, alone in zip(prompts, results, plain, strict=True):
        tokens, trace = eagle3(target, head, head_config, prompt, 24, num_drafts)
        assert result.token_ids == alone.token_ids == tokens
        assert result.trace == trace
        kept += sum(entry.accepted for entry in trace)
    assert kept > 0  # so that rounds of several tokens were absorbed


def test_a_seed_gives_the_text_that_it_gives_without_drafts(pair: Pair) -> None:
    drawn = Sampling(temperature=0.9, seed=4)
    both = [
        generate(pair, [prompt_of(9)], 20, method=method, sampling=drawn, ignore_eos=True)[0].token_ids
        for method in ("eagle3", "plain")
    ]
    assert both[0] == both[1]


def test_a_prefix_hit_proposes_what_no_hit_would(pair: Pair) -> None:
    """Prompts that agree on two small pages and differ right behind them: the second page's last K/V knows it."""
    prompts = [[5, 9, 2, 7, 1, 4, 10, 3, token, 6] for token in range(12)]

    def traces(engines: list[Engine]) -> list[list[TraceEntry]]:
        runs = []
        for prompt, engine in zip(prompts, engines, strict=True):
            runs.append(engine.submit(make_request(pair, prompt, 12, stop_ids=())))
            while runs[-1].finish_reason is None:
                engine.step()
        return [run.trace for run in runs]

    def engine() -> Engine:
        capacity, proposer = Capacity.whole(1, 8, 4), pair.proposer("eagle3", 3)
        return Engine(Device(pair, [proposer], capacity, 2, choose_greedily), Steady(proposer))

    shared = engine()
    assert traces([shared] * len(prompts)) == traces([engine() for _ in prompts])
    assert shared.pages.reserve(0, 8, [5, 9, 2, 7, 1, 4, 10]) == 4  # pages were shared: this one would be, too


def test_pages_are_known_by_the_token_behind_them() -> None:
    pages = PageAllocator(9, 4, 2, 4, lookahead=1)
    first = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert pages.reserve(0, 12, first) == 0
    pages.remember(0, first)
    assert pages.reserve(1, 12, [*first, 10]) == 8
    pages.release(1)
    assert pages.reserve(1, 12, [*first[:8], 0, 10]) == 4  # the second page was followed by 9
    pages.check_integrity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 40}, "hidden_size is 40, but the target's is 32"),
        ({"vocab_size": 16}, "vocab_size is 16, but the target's is 12"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"draft_vocab_size": 13}, "draft_vocab_size"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3]}}, "must be 3 layer numbers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}}, r"inputs of layers \[2, 3, 9\]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | changes))
    with pytest.raises(InputError, match=message):
        load_pair(folder / "target", tmp_path)


def test_methods_and_blocks_that_do_not_fit_are_refused(folder: Path, pair: Pair, tiny: Loaded) -> None:
    with pytest.raises(InputError, match='method is "dflash", and the drafter is made for "eagle3"'):
        generate(pair, [[1]], 1, method="dflash")
    with pytest.raises(InputError, match='method is "eagle3", and the drafter is made for "dflash"'):
        generate(tiny.pair, [[1]], 1, method="eagle3")
    with pytest.raises(InputError, match='num_drafts is "auto": that is for DFlash drafters'):
        generate(pair, [[1]], 1, num_drafts="auto")
    with pytest.raises(InputError, match="block_size is 4: an EAGLE-3 head has no blocks"):
        load_pair(folder / "target", folder / "head", block_size=4)
    with pytest.raises(InputError, match=r"num_drafts is 17: use an integer in 1..16"):
        generate(pair, [[1]], 1, num_drafts=17)


def test_a_shallow_target_has_no_three_taps(tmp_path: Path, tiny: Loaded) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    target = replace(tiny.pair.target.config, num_layers=4)
    with pytest.raises(InputError, match=r"inputs of layers \[2, 2, 1\] are tapped: they must be distinct"):
        read_eagle3_config(tmp_path, target)
