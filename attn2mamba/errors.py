"""The one exception that is the user's to fix."""


class UserError(Exception):
    """A user's mistake, told in one line: what is wrong and what to do.

    The command line prints the message without a traceback and exits with status 2.
    """
