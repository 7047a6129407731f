"""`DamagedError`: the error that the readers of all formats raise."""


class DamagedError(ValueError):
    """A file that is damaged or does not have the format that its name promises.

    The message is a noun phrase, such as "an event that is cut off".
    """
