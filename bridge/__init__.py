"""Arrays and positions shared by the torch-side proposer and the JAX verifier. Knows no model, no tokenizer, no
config."""
