"""`SecretText`: a setting that is never shown in full, such as a webhook's URL.

``secrets`` hides the secrets in a command line.
"""

from __future__ import annotations


class SecretText(str):
    """A string whose content is not shown: ``repr`` and ``str`` return what `hide_receiver` does.

    It is used for ``Policy.notify``, so that no message or file that shows a policy contains a
    password. ``"".join(text)`` returns the content.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return hide_receiver("".join(self))

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)


def hide_receiver(text: str) -> str:
    """Return a receiver of messages without what may be secret.

    Example:
        >>> hide_receiver("https://name:password@ntfy.sh/topic")
        'https://ntfy.sh/***'
        >>> hide_receiver("apprise tgram://token/chat")
        'apprise ***'
    """
    scheme, separator, rest = text.strip().partition("://")
    if separator and scheme.replace("+", "").isalnum():
        authority = rest
        for end in "/?#":
            authority = authority.partition(end)[0]
        # Other schemes, such as those of apprise, have a token in the place of the host.
        is_web = scheme.lower() in ("http", "https")
        return f"{scheme}://{authority.rpartition('@')[2]}/***" if is_web else f"{scheme}://***"
    words = text.split()
    # The first word may be an assignment, such as "TOKEN=... send", which is a mistake.
    if not words or "=" in words[0]:
        return "***"
    program = words[0]
    host, slash, _ = program.partition("/")
    if slash and "." in host.strip("."):
        # Probably a URL without its scheme, such as "ntfy.sh/topic".
        program = f"{host}/***"
    return program if len(words) == 1 else f"{program} ***"
