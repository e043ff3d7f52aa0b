"""What the README says is run: its Python, its commands, and the names it links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^(?:echo .*\| )?\.venv/bin/torch-dflash .*$", README, re.MULTILINE)


def test_python_snippets_run_in_order() -> None:
    assert len(SNIPPETS) == 2
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(SNIPPETS)], check=True, cwd=ROOT)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path) -> None:
    command = command.replace(".venv/bin/torch-dflash", f"{sys.executable} -m torch_dflash.cli")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout and ("tokens_per_second" in done.stdout or "tokens/s" in done.stderr)


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
