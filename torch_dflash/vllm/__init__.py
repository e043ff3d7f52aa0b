"""DFlash in vLLM on TPU for targets that run as torch modules (tpu-inference with MODEL_IMPL_TYPE=vllm).

The drafter is the one of the rest of this project: the same module, loader and block step. Only `plugin.py` and
`proposer.py` know vLLM's objects; `step.py` and `bridge/vllm_pages.py` are plain JAX and run without it.
"""
