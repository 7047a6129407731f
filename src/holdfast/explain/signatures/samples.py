"""Signatures of what samples are made of: batches that cannot be put together, data files that cannot be decoded.

Read through ``loading``. Does not match anything.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

_BATCHES: tuple[Signature, ...] = (
    Signature(
        id="H942",
        title="samples of different sizes cannot be stacked into a batch",
        family="loader",
        rank=60,
        patterns=(
            r"stack expects each tensor to be equal size",
            r"invalid argument 0: Sizes of tensors must match except in dimension 0",
            r"Trying to resize storage that is not resizable",
            r"all input arrays must have the same shape",
        ),
        means="The batch is stacked from samples of different shapes: texts or sounds of different lengths, images "
        "that were not resized, numbers of boxes, or predictions of a last, shorter batch.",
        fix="Give the DataLoader a collate_fn that pads (torch.nn.utils.rnn.pad_sequence) or keeps lists; resize "
        "images in the dataset. Join predictions with torch.cat.",
        false_positives="'Trying to resize storage' also comes from resize_() on a tensor that shares its memory "
        "with NumPy.",
        example="RuntimeError: stack expects each tensor to be equal size, but got [5] at entry 0 and [6] at entry 1",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.4": "RuntimeError: invalid argument 0: Sizes of tensors must match except in dimension 0. Got "
            "224 and 200 in dimension 2 at /pytorch/aten/src/TH/generic/THTensor.cpp:689",
            "torch 1.13, in a worker": "RuntimeError: Trying to resize storage that is not resizable",
        },
    ),
    Signature(
        id="H943",
        title="samples are lists of different lengths",
        family="loader",
        rank=60,
        patterns=(r"each element in list of batch should be of equal size",),
        means="The default collate function takes lists position by position, and they differ in length.",
        fix="Return tensors and pad them in a collate_fn, or tokenise with padding.",
        example="RuntimeError: each element in list of batch should be of equal size",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H944",
        title="a sample is None",
        family="loader",
        rank=60,
        patterns=(
            r"default_collate: batch must contain tensors, [^;\n]{1,80}; found <class 'NoneType'>",
            r"batch must contain tensors, numbers, dicts or lists; found <class 'NoneType'>",
        ),
        means="__getitem__ returned None, or a field of the sample is None: a missing return, an unreadable file "
        "that was skipped, or an optional field.",
        fix="Return the sample. To skip bad ones, drop None in a collate_fn or filter the dataset beforehand.",
        example="TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; "
        "found <class 'NoneType'>",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.0": "TypeError: batch must contain tensors, numbers, dicts or lists; found <class 'NoneType'>",
        },
    ),
    Signature(
        id="H1225",
        title="a sample is of a type that cannot be put into a batch",
        family="loader",
        rank=61,
        patterns=(r"batch must contain tensors, [^;\n]{1,80}; found (?!<class 'NoneType'>)\S",),
        means="The default collate function takes tensors, arrays, numbers, texts, dicts and lists. It met something "
        "else: an image that was not turned into a tensor, a date, an own class, an array of objects.",
        fix="Convert in the dataset, for images with ToTensor or torch.from_numpy, or write a collate_fn.",
        example="TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; "
        "found <class 'datetime.date'>",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.7": "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or "
            "lists; found <class 'PIL.Image.Image'>",
        },
    ),
    Signature(
        id="H1226",
        title="samples of one batch have different keys",
        family="loader",
        rank=86,
        only_exceptions=True,
        exceptions=("KeyError",),
        frames=(r"_utils[/\\]collate\.py:",),
        patterns=(r"\A",),
        means="The default collate function takes the keys of the first sample, and another one lacks one of them.",
        fix="Let every sample have the same keys, with a neutral value where there is nothing.",
        example="Traceback (most recent call last):\n  File "
        '"/venv/lib/python3.11/site-packages/torch/utils/data/_utils/collate.py", line 173, in '
        "<listcomp>\n"
        "KeyError: 'mask'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1227",
        title="sparse or nested tensors have no default way into a batch",
        family="loader",
        rank=61,
        patterns=(r"Batches of (?:sparse|nested) tensors are not currently supported by the default collate_fn",),
        means="A worker cannot put sparse or nested tensors into shared memory.",
        fix="Return dense tensors, or indices and values apart, and build the sparse tensor in the training loop.",
        example="RuntimeError: Batches of sparse tensors are not currently supported by the default collate_fn; "
        "please provide a custom collate_fn to handle them appropriately.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1228",
        title="rows of different lengths cannot become one tensor or array",
        family="shape or type",
        rank=62,
        patterns=(
            r"expected sequence of length \d+ at dim \d+ \(got \d+\)",
            r"setting an array element with a sequence\. The requested array (?:has an inhomogeneous shape|would)",
            r"setting an array element with a sequence\.\s*\Z",
            r"\A(?:TypeError: )?not a sequence\Z",
        ),
        means="torch.tensor or numpy.array got nested lists that are not a rectangle.",
        fix="Pad the rows to one length first, or keep a list of tensors. Look for a row with a missing field.",
        example="ValueError: expected sequence of length 3 at dim 1 (got 2)",
        seen="reproduced on torch 2.13",
        also={"NumPy 1.19": "ValueError: setting an array element with a sequence."},
    ),
    Signature(
        id="H1229",
        title="an array of objects or texts cannot become a tensor",
        family="shape or type",
        rank=62,
        patterns=(
            r"can't convert np\.ndarray of type [\w.]+\. The only supported types are",
            r"can't convert type <class 'numpy\.(?:ndarray|str_|object_|void)'> to tensor",
        ),
        means="The NumPy array holds Python objects, texts or records: a table with a missing or a text value "
        "becomes an array of objects as a whole.",
        fix="Print array.dtype. Convert it, array.astype(np.float32), and map texts to numbers before.",
        example="TypeError: can't convert np.ndarray of type numpy.object_. The only supported types are: "
        "float64, float32, float16, complex64, complex128, int64, int32, int16, int8, uint64, uint32, "
        "uint16, uint8, and bool.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1230",
        title="a flipped NumPy array cannot become a tensor",
        family="shape or type",
        rank=62,
        patterns=(
            r"At least one stride in the given numpy array is negative",
            r"some of the strides of a given numpy array are negative",
        ),
        means="Reversing with [::-1] or np.flip gives a view with a negative stride, which tensors do not have.",
        fix="Copy: torch.from_numpy(np.ascontiguousarray(array)).",
        example="ValueError: At least one stride in the given numpy array is negative, and tensors with negative "
        "strides are not currently supported. (You can probably work around this by making a copy of "
        "your array  with array.copy().)",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.0": "ValueError: some of the strides of a given numpy array are negative. This is currently not "
            "supported, but will be added in future releases.",
        },
    ),
)

_FILES: tuple[Signature, ...] = (
    Signature(
        id="H1231",
        title="an image file cannot be decoded",
        family="loader",
        rank=62,
        patterns=(
            r"cannot identify image file",
            r"image file is truncated",
            r"broken data stream when reading image file",
            r"\bTruncated File Read\b",
            r"broken PNG file|Truncated IDAT|unrecognized (?:image mode|data stream contents)",
            r"could be decompression bomb DOS attack",
        ),
        means="The file is empty, cut short, larger than Pillow allows, or no image at all, such as a saved error "
        "page of a web server.",
        fix="Find the file (the frame in the dataset has its name) and fetch it again. Check all once before "
        "training with Image.verify(); a few bad ones can be skipped by the dataset.",
        example="PIL.UnidentifiedImageError: cannot identify image file '0001.jpg'",
        seen="reproduced on torch 2.13 with Pillow 12",
    ),
    Signature(
        id="H1232",
        title="a NumPy file is broken, empty, or holds objects",
        family="loader",
        rank=62,
        frames=(r"numpy[/\\](?:lib|_?core)[/\\]",),
        patterns=(
            r"Object arrays cannot be loaded when allow_pickle=False",
            r"(?:Cannot load file containing|This file contains) pickled (?:\(object\) )?data",
            r"No data left in file",
            r"mmap length is greater than file size",
            r"EOF: reading array (?:data|header), expected \d+ bytes got \d+",
            r"Failed to read all data for array\. Expected",
            r"Failed to interpret file .{1,300} as a pickle",
            r"magic string is not correct; expected b",
            r"Cannot parse header|Header (?:is not a dictionary|does not contain)",
            r"File is not a zip file|Bad magic number for|Bad CRC-32 for file",
        ),
        means="np.load met a file that was cut short, is empty, is no .npy file (such as the pointer of a large-file "
        "store), or holds Python objects.",
        fix="Look at its size and first bytes; write or fetch it again. For your own object arrays pass "
        "allow_pickle=True; better, save plain arrays.",
        example="ValueError: Object arrays cannot be loaded when allow_pickle=False",
        seen="reproduced on torch 2.13 with NumPy 2",
    ),
    Signature(
        id="H1233",
        title="an HDF5 file cannot be read, or lacks what is asked for",
        family="loader",
        rank=62,
        patterns=(
            r"Unable to (?:synchronously )?(?:open|create) (?:file|object|dataset)\b(?!.{0,300}\berrno = 2\b)",
            r"(?:Unable to|Can't) (?:synchronously )?(?:read|write|get) (?:data|dataset|dataspace|group info)\b",
            r"Not a (?:location|dataset|file)(?: id)? \(",
        ),
        means="The file is cut short, locked by a writer, or not HDF5; or the name is not in it. Handles opened "
        "before a fork or sent to a worker fail too.",
        fix="Open the file in the worker, at first use. 'file signature not found' and 'truncated file' mean: fetch "
        "it again. For a lock set HDF5_USE_FILE_LOCKING=FALSE if nobody writes.",
        example="OSError: Unable to synchronously open file (file signature not found)",
        seen="reproduced on torch 2.13 with h5py 3",
        also={
            "h5py 2.10": "OSError: Unable to open file (truncated file: eof = 800, sblock->base_addr = 0, "
            "stored_eof = 82048)",
            "h5py 3.10, a name": "KeyError: \"Unable to synchronously open object (object 'train' doesn't exist)\"",
        },
    ),
    Signature(
        id="H1234",
        title="an audio file cannot be decoded",
        family="loader",
        rank=62,
        patterns=(
            r"file does not start with RIFF id",
            r"not a WAVE file|fmt chunk and/or data chunk missing",
            r"\A(?:wave\.)?(?:Error: )?unknown format: \d+",
            r"Unknown wave file format",
            r"File format b'[^']{0,20}' not understood\. Only 'RIFF'",
            r"Error opening [^\n]{1,300}: (?:Format not recognised|File contains data in an unknown format)",
            r"Couldn't find appropriate backend to handle uri",
        ),
        means="The file is not of the format that its name says, or was not fetched whole; or torchaudio has no "
        "decoder for it.",
        fix="Look at its first bytes with `file`. Convert to WAV or FLAC once (ffmpeg), or install soundfile.",
        example="wave.Error: file does not start with RIFF id",
        seen="reproduced on torch 2.13 with the standard library and SciPy",
        also={
            "soundfile": "soundfile.LibsndfileError: Error opening 'a.wav': Format not recognised.",
            "torchaudio 2.1": "RuntimeError: Couldn't find appropriate backend to handle uri a.mp3 and format None.",
        },
    ),
    Signature(
        id="H1235",
        title="a text file is in another encoding",
        family="user code",
        rank=65,
        patterns=(r"'[\w-]+' codec can't (?:decode|encode) (?:byte|character)s?",),
        means="The bytes are not of the encoding that the file was opened with: Latin-1 or UTF-16 read as UTF-8, or "
        "a binary or compressed file read as text.",
        fix="Open with the right encoding=...; 'byte 0xff in position 0' means UTF-16, 0x1f or 0x8b gzip, 0x80 a "
        "pickle. For a few bad characters use errors='replace'.",
        example="UnicodeDecodeError: 'utf-8' codec can't decode byte 0xdc in position 0: invalid continuation byte",
        seen="reproduced on Python 3.11",
    ),
    Signature(
        id="H1236",
        title="a value in a column of numbers is none",
        family="user code",
        rank=75,
        patterns=(
            r"could not convert string (?:to float|'[^'\n]{0,100}' to \w+)",
            r"invalid literal for int\(\) with base \d+",
        ),
        exceptions=("ValueError",),
        means="A text was read as a number: a heading, an empty field, 'n/a', a unit, or a comma for a point.",
        fix="The message quotes it. Skip the heading, and clean the column before training.",
        example="ValueError: could not convert string to float: 'n/a'",
        seen="reproduced on Python 3.11",
    ),
    Signature(
        id="H1237",
        title="an archive or compressed file of data is broken",
        family="loader",
        rank=64,
        only_exceptions=True,
        exceptions=(
            "BadGzipFile",
            "EOFError",
            "BadZipFile",
            "ReadError",
            "LZMAError",
            "OSError",
            "error",
            "ValueError",
        ),
        patterns=(
            r"Not a gzipped file \(",
            r"Compressed (?:file|data) ended before the end-of-stream marker was reached",
            r"\bis not a (?:zip|tar) file",
            r"Bad magic number for",
            r"(?:truncated|invalid|empty) header|bad checksum",
            r"Bad CRC-32 for file",
            r"CRC check failed",
            r"file could not be opened successfully",
            r"unexpected end of data",
            r"Error -\d while decompressing data",
            r"Corrupt input data|Input format not supported by decoder",
            r"Invalid data stream",
        ),
        means="The file was not fetched whole, is damaged, or is something else, such as an error page.",
        fix="Delete it and fetch it again; compare its size or checksum with the source.",
        false_positives="A checkpoint of torch.save is a zip file too, but says 'failed finding central directory'.",
        example="Traceback (most recent call last):\n  File "
        '"/usr/lib/python3.11/gzip.py", line 428, in _read_gzip_header\n'
        "gzip.BadGzipFile: Not a gzipped file (b'<h')",
        seen="reproduced on Python 3.11",
    ),
    Signature(
        id="H1238",
        title="a line of a data file cannot be parsed",
        family="user code",
        rank=66,
        patterns=(
            r"field larger than field limit \(\d+\)",
            r"line contains NUL",
            r"new-line character seen in unquoted field",
            r"the number of columns changed from \d+ to \d+ at row",
            r"Line #\d+ \(got \d+ columns instead of \d+\)",
            r"'[^']' expected after '[^']'",
            r"Error tokenizing data\. C error",
        ),
        means="A line of a CSV file does not have the form of the others: another number of fields, an open "
        "quotation mark, a very long field, or zero bytes of a half-written file.",
        fix="Look at the line that the message names. Quote fields, or csv.field_size_limit for long ones.",
        example="_csv.Error: field larger than field limit (131072)",
        seen="reproduced on Python 3.11",
        also={
            "pandas": "pandas.errors.ParserError: Error tokenizing data. C error: Expected 3 fields in line 5, saw 4",
        },
    ),
    Signature(
        id="H1239",
        title="the database behind the dataset refuses",
        family="loader",
        rank=64,
        patterns=(
            r"database is locked",
            r"file is not a database",
            r"database disk image is malformed",
            r"unable to open database file|attempt to write a readonly database",
            r"no such (?:table|column): \w+",
            r"Cannot operate on a closed database",
            r"SQLite objects created in a thread can only be used in that same thread",
            r"MDB_(?:READERS_FULL|MAP_FULL|CORRUPTED|INVALID|BAD_RSLOT)\b",
        ),
        exceptions=(
            "OperationalError",
            "DatabaseError",
            "ProgrammingError",
            "ReadersFullError",
            "MapFullError",
            "CorruptedError",
            "InvalidError",
            "BadRslotError",
        ),
        means="SQLite or LMDB is locked by a writer, damaged, or its handle is shared between threads or processes.",
        fix="Open one connection in each worker, read-only, at first use. Copy the file to a local disk.",
        example="sqlite3.DatabaseError: file is not a database",
        seen="reproduced on Python 3.11",
        also={
            "lmdb": "lmdb.ReadersFullError: mdb_txn_begin: MDB_READERS_FULL: Environment maxreaders limit reached",
        },
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_BATCHES, *_FILES)
"""Every signature of what samples are made of."""
