"""What the README says is run: its Python, its commands, and the names it links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
BLOCKS = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if ".venv/bin/torch-dflash" in block]


def test_python_snippets_run_in_order() -> None:
    assert len(SNIPPETS) == 3
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(SNIPPETS)], check=True, cwd=ROOT)


@pytest.mark.parametrize("number", range(2))
def test_commands_run(number: int, tmp_path: Path) -> None:
    assert len(BLOCKS) == 2
    commands = BLOCKS[number].replace(".venv/bin/torch-dflash", f"{sys.executable} -m torch_dflash.cli")
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s") >= (2, 1)[number]
    assert done.stdout.count(("tokens_per_second", "healthy")[number]) == 1


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
