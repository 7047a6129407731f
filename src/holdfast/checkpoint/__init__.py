"""Save trees of training state to files without pickle, and load them with every byte verified.

To write a checkpoint, ``codec`` turns a tree of state into JSON and named tensors, ``saver`` takes
a snapshot of both and writes it to files (``tensor_files``), and ``store`` commits the files by
renaming their folder. ``manifest`` records the expected contents of each file.

To read a checkpoint, ``newest`` finds the newest one that passes ``verify``, and ``loading``
returns the trees that it contains. ``export`` writes only the weights to a file. ``read_errors``
distinguishes damaged bytes from a disk that is temporarily unreadable.

``seal`` adds a manifest to a checkpoint written by a framework. ``interval`` chooses how often to
save. ``background`` and ``buffers`` let training continue while a checkpoint is written. ``kinds``
and ``expanded`` handle tensors with uncommon dtypes and layouts, and ``health`` finds NaN and Inf.
"""
