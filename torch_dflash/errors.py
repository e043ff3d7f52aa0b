"""The one error that is the user's to fix."""


class InputError(ValueError):
    """Bad input from outside: one line that names the field, its value and the remedy. The command exits with 2."""
