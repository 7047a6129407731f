"""``python -m benchmarks.failures NAME`` runs one failure in this process; ``--list`` shows all."""

from __future__ import annotations

import sys

from benchmarks.failures import all_failures, find_failure, run_here


def main() -> None:
    """Run what the command line names."""
    if len(sys.argv) != 2:
        sys.exit("give the name of one failure, or --list")
    if sys.argv[1] == "--list":
        for each in all_failures().values():
            print(f"{each.label:6}  {each.author}  {each.name}{'' if each.possible else '  (cannot run here)'}")
    else:
        run_here(find_failure(sys.argv[1]))


if __name__ == "__main__":
    main()
