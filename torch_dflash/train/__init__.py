"""Training a drafter: answers -> features -> training -> export. See `command.py` for the order of the stages."""
