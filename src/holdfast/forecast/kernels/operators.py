"""Read the lists of aten operators in ``operators.yaml``.

`LISTS` maps the name of each section to the names of the operators in it.
"""

from __future__ import annotations

from importlib import resources

import yaml

_TEXT = resources.files(__package__).joinpath("operators.yaml").read_text(encoding="utf-8")
LISTS: dict[str, tuple[str, ...]] = {
    name: tuple(names.split()) for name, names in yaml.safe_load(_TEXT).items()
}
