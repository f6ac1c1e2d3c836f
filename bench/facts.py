"""What a page of results says of its run: the command, to be given again, and the CPU."""

from __future__ import annotations

import sys
from pathlib import Path


def command() -> str:
    """Return the command of this process, without the folders of the machine."""
    script, *words = sys.argv
    plain = ["FOLDER" if word.startswith("/") else word for word in words]
    return " ".join(["python", f"bench/{Path(script).name}", *plain])


def processor() -> str:
    """Return the name of the CPU, "?" where the kernel does not say."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "?")
