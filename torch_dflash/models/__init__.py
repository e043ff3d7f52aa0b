"""Plain torch modules. They import torch and the config, nothing of JAX: attention arrives as an argument."""
