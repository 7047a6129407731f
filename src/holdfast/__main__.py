"""Run the CLI as `python -m holdfast`, which also works if the `holdfast` script is not on PATH."""

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
