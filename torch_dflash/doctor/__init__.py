"""Whether a drafter's configuration is the one it was trained with: `torch-dflash doctor`. See `examine.py`."""
