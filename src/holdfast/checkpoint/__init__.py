"""Checkpoints: trees of tensors in files without pickle, with a digest for every byte.

How a checkpoint is written, in this order: ``codec`` turns a tree of state into JSON and named
tensors, ``saver`` takes a snapshot of them and writes it as files (``tensor_files``), and ``store``
commits the files under their final name. ``manifest`` lists what each file must hold.

How one is read: ``newest`` finds the newest checkpoint that verifies (``verify``), and ``loading``
returns its trees. ``export`` writes the weights alone. ``read_errors`` distinguishes damaged bytes
from a disk that is temporarily unreadable.

``seal`` adds a manifest to what a framework has written. ``interval`` chooses how often to save,
``background`` and ``buffers`` let training continue while a checkpoint is written. ``kinds`` and
``expanded`` handle tensors of rare dtypes and layouts; ``health`` finds NaN and Inf.
"""
