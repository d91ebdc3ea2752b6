"""The one exception that is shown to a user as a sentence, without a traceback."""


class UserError(ValueError):
    """A mistake that the user can mend: the message says what was wrong and what would be right."""
