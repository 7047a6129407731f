"""Run the command line as `python -m holdfast`, for when the `holdfast` script is not on PATH."""

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
