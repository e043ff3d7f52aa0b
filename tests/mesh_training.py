"""Run by test_train_command.py with two fake devices: the command on one device, on both, and on what does not fit.

Prints JSON: for each run its exit code, on how many devices the state lay, the last line of its log, and what it
decoded of held-out prompts.
"""

import json
import sys
from pathlib import Path
from typing import Any

from helpers import BYTES_PAIR

from torch_dflash import cli
from torch_dflash.train import pipeline
from torch_dflash.train.records import Answer, append_answers

devices = []
run = pipeline.run


def watched(trainer: Any, state: Any, *rest: Any) -> Any:
    devices.append(len(state.step.sharding.device_set))
    return run(trainer, state, *rest)


pipeline.run = watched
folder = Path(sys.argv[1])
prompts = folder / "prompts.jsonl"
prompts.write_text("".join(json.dumps({"turns": [f"f{i}"]}) + "\n" for i in range(8)))
answers = [Answer(i, tuple(f"f{i}".encode()), tuple(97 + (i * j) % 7 for j in range(20))) for i in range(8)]
new = ["--layers", "1", "--taps", "2", "--block-size", "4"]
on_top = ["--start-from", str(BYTES_PAIR / "draft"), "--selector-rank", "6"]
short = ["--anchors", "2", "--steps", "3", "--dtype", "float32"]
held_out = ["--eval-every", "3", "--eval-prompts", str(prompts), "--eval-count", "2", "--eval-tokens", "8"]
for count, rows, shape in ((1, 4, new), (1, 4, on_top), (2, 4, new), (2, 4, on_top), (2, 3, new), (3, 6, new)):
    out = folder / f"{count}-{rows}-{len(shape)}"
    out.mkdir()
    append_answers(out / "answers.jsonl", answers)
    own = ["--mesh", str(count), "--rows", str(rows), "--out", str(out)]
    learning = ["--learning-rate", "1e-2", "--distill", "0.5"]
    target = ["--target", str(BYTES_PAIR / "target")]
    code = cli.main(["train", str(prompts), *target, *shape, *short, *own, *learning, *held_out])
    log = (out / "log.jsonl").read_text().splitlines() if code == 0 else ["null", '{"held_out": null}']
    last, decoded = (json.loads(line) for line in log[-2:])
    print(json.dumps({"code": code, "devices": devices[-1], "log": last, "held_out": decoded["held_out"]}))
