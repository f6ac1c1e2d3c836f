"""Compare the connector with a vLLM wheel that is not installed: ``check_vllm_wheel.py WHEEL``.

``pip download --no-deps vllm==X.Y.Z`` fetches one; it is only read, never imported.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

if __package__:
    from .vllm_source import check
else:
    sys.path.insert(0, str(Path(__file__).parent))
    from vllm_source import check


def check_wheel(wheel: Path) -> list[str]:
    """Return what does not fit the vLLM in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        return check(lambda path: archive.read(path).decode() if path in names else None)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    problems = check_wheel(Path(sys.argv[1]))
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else "the connector fits")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
