"""Signatures of files that are written and read beside the samples: JSON, YAML, TOML, INI, npz, pictures.

Damaged files of samples (HDF5, images, zip) lie in ``samples``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H1339",
        title="a numpy archive without the array that is asked for, or an array cut short",
        family="storage",
        rank=66,
        patterns=(
            r"\bis not a file in the archive\b",
            r"\bcannot reshape array of size \d+ into shape\b",
            r"\bthe magic string is not correct\b|\bEOF: reading magic string\b",
        ),
        exceptions=("KeyError", "ValueError"),
        frames=(r"numpy/lib/[\w/]+\.py:",),
        only_exceptions=True,
        means="The `.npz` was written with other names, or the data end before the header says.",
        fix="`numpy.load(path).files` lists the arrays. Copy or compute a file that is cut short again.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/numpy/lib/_npyio_impl.py", line 256, in __getitem__\nKeyError: '
        "'test is not a file in the archive'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1377",
        title="a JSON file that is damaged, empty or not strict",
        family="user code",
        patterns=(
            (
                r"\bExpecting (?:value|property name enclosed in double quotes|',' delimiter|':' delimiter): line "
                r"\d+ column \d+"
            ),
            (
                r"\b(?:Unterminated string starting at|Extra data|Invalid control character at|Invalid \\+\w* "
                r"?escape|Illegal trailing comma before end of (?:object|array)): line \d+ column \d+"
            ),
            r"\bUnexpected UTF-8 BOM \(decode using utf-8-sig\)",
        ),
        exceptions=("JSONDecodeError", "ValueError"),
        means="JSON allows no comments, no comma after the last entry and only double quotes. A file that ends "
        "early was cut off while it was written; `line 1 column 1 (char 0)` is an empty file or a web page; `Extra "
        "data` is JSON lines.",
        fix="`python -m json.tool FILE` shows the place. Read JSON lines line by line; write state files to "
        "another name and rename them.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1378",
        title="a settings file (YAML, TOML, INI) that cannot be parsed or lacks an entry",
        family="user code",
        patterns=(
            r"\bmapping values are not allowed (?:here|in this context)",
            (
                r"\bwhile (?:scanning|parsing) (?:for the next token|a (?:simple key|block mapping|block "
                r"collection|flow (?:mapping|sequence|node)|quoted scalar|block scalar|node|tag|plain scalar|"
                r"anchor|alias|directive))"
            ),
            r"\bcould not determine a constructor for the tag\b",
            r"\bfound character '[^\n]{1,4}' that cannot start any token",
            (
                r"\b(?:Invalid value|Expected '=' after a key|Cannot overwrite a value|Invalid statement|Unclosed "
                r"array|Cannot declare \([^\n]{1,80}\) twice|Invalid date or number|Illegal character) "
                r"(?:[^\n]{0,60})?\(at line \d+, column \d+\)"
            ),
            r"\bFile contains no section headers\b",
            r"\bNo (?:section|option '[^'\n]{1,100}' in section): '[^'\n]{1,100}'",
            r"\bSource contains parsing errors\b",
            (
                r"\bfound undefined alias\b|\bfound duplicate (?:key|anchor)\b|\bexpected (?:<block end>|<document "
                r"start>|',' or ')"
            ),
        ),
        exceptions=(
            "ScannerError",
            "ParserError",
            "ConstructorError",
            "ComposerError",
            "YAMLError",
            "ReaderError",
            "TOMLDecodeError",
            "TomlDecodeError",
            "MissingSectionHeaderError",
            "NoOptionError",
            "NoSectionError",
            "ParsingError",
            "DuplicateOptionError",
            "DuplicateSectionError",
            "DuplicateKeyError",
        ),
        means="The file breaks the rules of its format: tabs or a second colon in YAML, text without quotes in "
        "TOML, options before the first section in INI; or an entry is missing.",
        fix="The message gives line and column. In YAML indent with spaces and quote values with a colon; a tag "
        "like `!!python/object` is refused on purpose.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        'yaml.scanner.ScannerError: mapping values are not allowed here\n  in "<unicode string>", line 1, column '
        "10:\n    name: run: first\n             ^",
        seen="reproduced on torch 2.13",
        also={
            "TOML": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "tomllib.TOMLDecodeError: Invalid value (at line 2, column 8)",
        },
    ),
    Signature(
        id="H1391",
        title="an object that cannot be written as JSON",
        family="user code",
        patterns=(
            r"\bObject of type \w+ is not JSON serializable\b",
            r"\bOut of range float values are not JSON compliant\b",
            r"\bkeys must be str, int, float, bool or None, not\b",
            r"\bCircular reference detected\b",
        ),
        exceptions=("TypeError", "ValueError"),
        means="JSON knows text, numbers, lists and dictionaries. A tensor, a numpy number, a path or a date was in "
        "what is written.",
        fix="Convert when the record is made: `loss.item()`, `float(x)`, `x.tolist()`, `str(path)`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: Object '
        "of type Tensor is not JSON serializable",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1398",
        title="a picture that cannot be made from this array, or saved in this format",
        family="user code",
        rank=68,
        patterns=(
            r"\bcannot write mode \w+ as \w+",
            r"\bCannot handle this data type: \(",
            r"\bunknown file extension: ",
            r"\bimage has wrong mode\b|\bconversion from \w+ to \w+ not supported\b",
        ),
        exceptions=("OSError", "TypeError", "KeyError", "ValueError"),
        means="Pillow takes (height, width) or (height, width, 3 or 4) arrays of uint8. JPEG has no alpha channel, "
        "and the suffix of the file chooses the format.",
        fix="`x.permute(1, 2, 0).mul(255).byte().numpy()` for a tensor of values from 0 to 1; "
        "`image.convert('RGB')` before JPEG.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: cannot '
        "write mode RGBA as JPEG",
        seen="reproduced with Pillow",
        also={
            "array": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
            "Cannot handle this data type: (1, 1, 4), <f8",
        },
    ),
)
