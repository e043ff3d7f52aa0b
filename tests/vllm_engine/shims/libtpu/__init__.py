"""An empty package: with it on the path, tpu-inference's platform starts on CPU JAX."""
