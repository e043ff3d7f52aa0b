"""The TPU without a TPU: what programs would cost on a chip, and what its compiler makes of them."""
