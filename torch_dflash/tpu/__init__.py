"""What can be said about a TPU without one: memory, rooflines, and the facts of compiled programs. Model estimates."""
