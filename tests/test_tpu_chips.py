"""The chips' figures, and names -> folders of shapes."""

from pathlib import Path

import pytest
from config_files import assert_line

from torch_dflash import default_model
from torch_dflash.config import BlockConfig
from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config
from torch_dflash.errors import InputError
from torch_dflash.tpu.chips import CHIPS, chip_named
from torch_dflash.tpu.shapes import DRAFTERS, TARGETS, drafter_folder, drafter_of, target_folder


def test_published_figures() -> None:
    v5p, v6e, v5e = CHIPS
    assert (v5p.hbm_bytes, v6e.hbm_bytes, v5e.hbm_bytes) == (95 * 2**30, 32e9, 16e9)
    assert [chip.hbm_bytes_per_second for chip in CHIPS] == [2.765e12, 1.64e12, 0.819e12]
    assert [chip.flops_per_second for chip in CHIPS] == [459e12, 918e12, 197e12]


def test_chips_are_found_in_any_case_and_others_refused() -> None:
    assert [chip_named(name).name for name in ("v5p", "V6E", " v5e ")] == ["v5p", "v6e", "v5e"]
    for name in ("", "v4", "h100", "v5"):
        with pytest.raises(InputError) as error:
            chip_named(name)
        assert_line(error.value, f"chip is {name!r}", "v5p, v6e, v5e")


def test_the_smallest_topology_that_holds_the_chips() -> None:
    v5p, v6e, v5e = CHIPS
    assert [v5p.topology(n) for n in (1, 3, 4, 5)] == ["v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x1", "v5p:2x2x2"]
    assert [v6e.topology(n) for n in (1, 2, 8)] == ["v6e:1x1", "v6e:1x2", "v6e:2x4"]
    with pytest.raises(InputError) as error:
        v5e.topology(9)
    assert_line(error.value, "tp is 9", "at most 8 chips of v5e", "lower tp")


@pytest.mark.parametrize("target", [*TARGETS, "default", "bytes"])
def test_built_in_shapes_are_read_by_the_common_readers_and_fit_together(target: str) -> None:
    drafter = drafter_of(target)
    assert drafter is not None
    check_pair(read_target_config(target_folder(target)).shape, read_drafter_config(drafter_folder(drafter)))


def test_the_published_shapes() -> None:
    small = read_target_config(target_folder("Qwen/Qwen3-4B"))
    assert small.block == BlockConfig(2560, 9728, 32, 8, 128, 1e-6, False, False, True)
    assert (small.num_layers, small.vocab_size, small.tie_word_embeddings) == (36, 151936, True)
    llama = read_target_config(target_folder("meta-llama/Llama-3.1-8B"))
    assert llama.block == BlockConfig(4096, 14336, 32, 8, 128, 1e-5, False, False, False)
    assert (llama.num_layers, llama.vocab_size, llama.context_limit) == (32, 128256, 131072)
    drafters = [read_drafter_config(drafter_folder(name)) for name in DRAFTERS]
    assert [d.block_size for d in drafters] == [16, 16, 10]
    assert drafters[0].target_layer_ids == drafters[1].target_layer_ids == (1, 9, 17, 25, 33)
    assert drafters[2].target_layer_ids == (1, 8, 15, 22, 29)


def test_the_default_target_has_the_shape_of_the_model_itself(tmp_path: Path) -> None:
    default_model._write_json(tmp_path / "config.json", default_model._CONFIG)
    assert read_target_config(target_folder("default")) == read_target_config(tmp_path)


def test_names_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "Qwen3-4B").mkdir()
    (tmp_path / "Qwen3-4B" / "config.json").write_text("{}")
    built_in = target_folder("qwen/qwen3-4b")
    assert built_in == target_folder("QWEN3-4b") and built_in.is_absolute()
    assert target_folder("Qwen3-4B") == Path("Qwen3-4B")  # a folder wins over a built-in name
    assert target_folder("Qwen3-4B/config.json") == Path("Qwen3-4B")
    assert drafter_folder("~/Qwen3-4B") == tmp_path / "Qwen3-4B"


@pytest.mark.parametrize("name", ["", "nowhere", "other/Qwen3-8B", "x" * 300, "a\0b", "z-lab/Qwen3-4B-DFlash-b16"])
def test_unknown_names_are_answered_with_those_known(name: str) -> None:
    with pytest.raises(InputError) as error:
        target_folder(name)
    assert_line(error.value, "no such folder or config.json", *TARGETS, "default", "bytes")


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text("{}")
    with pytest.raises(InputError) as error:
        drafter_folder(str(tmp_path / "shape.json"))
    assert_line(error.value, 'draft "', "must be called config.json")


def test_only_built_in_targets_have_a_built_in_drafter() -> None:
    assert drafter_of("qwen3-8b") == "z-lab/Qwen3-8B-DFlash-b16"
    assert drafter_of("/some/folder") is None
