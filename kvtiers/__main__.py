"""``python -m kvtiers``: the command line."""

from __future__ import annotations

from kvtiers.cli.main import app

if __name__ == "__main__":
    app(prog_name="kvtiers")
