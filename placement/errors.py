"""The one error type a user may see as a single line."""


class UserError(ValueError):
    """A mistake of the caller: the message names the value, the rule and the remedy in one line.

    The command lines print it without a traceback and exit with code 2.
    """
