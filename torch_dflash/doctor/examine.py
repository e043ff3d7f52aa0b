"""All of the doctor: read the pair, check its weights, let the target write, try the mistakes, conclude."""

from collections.abc import Sequence
from pathlib import Path

from torch_dflash.config import ZLAB, DrafterConfig, TargetConfig
from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config, stated_window
from torch_dflash.doctor.measure import check_texts, measure, verdict
from torch_dflash.doctor.report import Model, Report
from torch_dflash.doctor.texts import builtin_prompts, write_texts
from torch_dflash.doctor.variants import plausible_mistakes, token_text
from torch_dflash.doctor.weights import check_weights
from torch_dflash.errors import checked_integer
from torch_dflash.hub import resolve_draft, resolve_target
from torch_dflash.pair import DTYPES, load_drafter, load_target, timed
from torch_dflash.tokenizer import as_chat, load_tokenizer
from torch_dflash.weights import stored_dtypes


def examine(
    target_name: str, draft_name: str, dtype: str, prompts: Sequence[str] | None, max_new_tokens: int
) -> Report:
    """What there is to say about a pair. `prompts`: texts, None for the built-in ones. Raises InputError."""
    checked_integer(max_new_tokens, "max_new_tokens", 1)
    folders = resolve_target(target_name), resolve_draft(draft_name)
    check_pair(read_target_config(folders[0]).shape, read_drafter_config(folders[1]))
    tokenizer = load_tokenizer(folders[0])
    with timed(f"load target {target_name}, {dtype}"):
        target_config, target = load_target(folders[0], DTYPES[dtype])
    with timed(f"load drafter {draft_name}, {dtype}"):
        config, drafter = load_drafter(folders[1], DTYPES[dtype])
    checks, run = check_weights(target, drafter, config), None
    if all(check.level != "broken" for check in checks):
        asked = [as_chat(text, tokenizer) for text in prompts or ()] or builtin_prompts(target_config, tokenizer)
        with timed("write the target's own answers"):
            texts = write_texts(target, target_config, tokenizer, asked, max_new_tokens)
        checks += check_texts(config, texts)
        mistakes = plausible_mistakes(target_config, config, tokenizer, stated_window(folders[1]))
        with timed(f"draft under the configuration and {len(mistakes)} mistakes"):
            run = measure(target, drafter, config, mistakes, texts)
    return Report(
        target=_model(target_name, folders[0], target_config),
        drafter=_model(draft_name, folders[1], config),
        mask_text=token_text(tokenizer, config.mask_token_id),
        dtype=dtype,
        checks=tuple(checks),
        run=run,
        verdict=verdict(checks, run),
    )


def _model(name: str, folder: Path, config: TargetConfig | DrafterConfig) -> Model:
    layout = config.layout if isinstance(config, DrafterConfig) else ZLAB
    return Model(name, str(folder), stored_dtypes(folder, layout), config)
