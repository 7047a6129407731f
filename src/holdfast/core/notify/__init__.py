"""Send messages about a run to a person.

`Notifier` (in ``notifier``) sends a `Message` to a receiver. ``receivers`` reads the value of
``--notify`` and ``Policy.notify``, which is a webhook or a command. ``post`` is the program that
sends a message to a webhook.

The supervisor and the guard decide which events are worth a message.
"""
