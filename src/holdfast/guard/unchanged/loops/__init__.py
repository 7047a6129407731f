"""The loops of the script over torch ``DataLoader`` objects.

loop      `Loop` and the iterator that the script gets instead of torch's own
places    which statement of the script iterates a loader, and whether it can be resumed
wrappers  the ``enumerate`` objects and other wrappers between a loop and its loader
ends      whether the code after a loop is the same as if its iterator were exhausted
bytecode  answers questions about the compiled code of a loop, for ``places`` and ``ends``

Nothing here may keep a frame or the script's iterator alive: the end of a loop that is left by
``break`` is noticed only because Python frees the iterator.
"""
