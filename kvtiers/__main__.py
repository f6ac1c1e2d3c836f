"""``kvtiers`` and ``python -m kvtiers``: the command line."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # as `kvtiers.cli.output` has it, which cannot be imported yet


def main() -> None:
    """Run the verb that the arguments name; Ctrl-C gives no traceback, however early it comes."""
    try:
        from kvtiers.cli.main import app  # noqa: PLC0415 - takes a while

        app(prog_name="kvtiers")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
