"""A drafter of this project in the original: PyPI dflash 0.1.0 proposes the same drafts, round by round.

The original needs an environment of its own (it pins torch and transformers), so this script runs twice:

    python scripts/check_original.py ours TARGET DRAFTER rounds.json      # with torch_dflash installed
    python scripts/check_original.py theirs TARGET DRAFTER rounds.json    # in a venv with dflash==0.1.0; compares
"""

import json
import sys
from pathlib import Path

PROMPTS = ("What is 7 * 8 + 3? Reason step by step.", "Write a Python function that reverses a string.")
NEW_TOKENS = 64


def ours(target: str, draft: str, path: Path) -> None:
    """Write the prompts' ids, the tokens and each round's anchor position and drafts."""
    from torch_dflash import generate, load_pair

    pair = load_pair(target, draft)
    chats = [
        pair.tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in PROMPTS
    ]
    prompts = [pair.tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
    results = generate(pair, prompts, NEW_TOKENS, trace=True, ignore_eos=True)
    held = [
        {
            "prompt_ids": list(p),
            "token_ids": list(r.token_ids),
            "rounds": [[e.start, list(e.proposed)] for e in r.trace],
        }
        for p, r in zip(prompts, results, strict=True)
    ]
    path.write_text(json.dumps(held))


def theirs(target: str, draft: str, path: Path) -> None:
    """Run the original and compare. Its last blocks are shorter, which changes drafts: they are left out."""
    import dflash.model
    import torch
    from transformers import AutoModelForCausalLM

    (name,) = json.loads((Path(draft) / "config.json").read_text())["architectures"]
    model = getattr(dflash.model, name).from_pretrained(draft, dtype=torch.float32).eval()
    says, read = {
        "DFlashDraftModel": ("compute_logits", lambda logits: logits.argmax(-1)),
        "DFlash2DraftModel": ("propose", lambda proposal: proposal[0]),
    }[name]
    whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    rounds: list[list] = []
    forward, drafts = model.forward, getattr(model, says)
    model.forward = lambda *a, **k: (
        rounds.append([int(k["position_ids"][0, -k["noise_embedding"].shape[1]])]) or forward(*a, **k)
    )

    def listen(*args):
        out = drafts(*args)
        rounds[-1].append(read(out)[0].tolist())
        return out

    setattr(model, says, listen)
    for held in json.loads(path.read_text()):
        rounds.clear()
        with torch.inference_mode():
            ids = dflash.model.dflash_generate(model, whole, torch.tensor([held["prompt_ids"]]), NEW_TOKENS, None)
        assert ids[0, len(held["prompt_ids"]) :].tolist() == held["token_ids"], "other tokens"
        full = [r for r in rounds if len(r[1]) == model.block_size - 1]
        assert len(full) > 3
        assert full == held["rounds"][: len(full)], "other proposals"
        print(f"{len(full)} rounds and {len(held['token_ids'])} tokens are the same")


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](sys.argv[2], sys.argv[3], Path(sys.argv[4]))
