"""Runs at the start of every Python process of the engine suite (scripts/test-vllm puts this folder on PYTHONPATH)."""

import cpu_shims

cpu_shims.install()
