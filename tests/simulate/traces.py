"""Small traces of the two formats, written by tests."""

import json
from pathlib import Path

import pytest

REAL = Path(__file__).parents[3] / "shared" / "data"


def real_trace(name: str) -> Path:
    """Return the path of a public trace; skips the test where it is not on this machine."""
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{name} is not beside the checkout: the public traces are not committed")
    return path


def line(timestamp: float, ids: list[int], output_length: int = 10, tokens: int = 0) -> dict:
    return {
        "timestamp": timestamp,
        "input_length": tokens or 512 * len(ids),
        "output_length": output_length,
        "hash_ids": ids,
    }


def write_conversation(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def call(t: float, ids: list[int], tokens: int = 0, **more) -> dict:
    return {"t": t, "type": "n", "in": tokens or 64 * len(ids), "out": 5, "hash_ids": ids, **more}


def session(*requests: dict, scope: str = "local") -> dict:
    return {"id": "s", "block_size": 64, "hash_id_scope": scope, "requests": list(requests)}


def write_sessions(folder: Path, *sessions: dict) -> Path:
    folder.mkdir(exist_ok=True)
    for number, entry in enumerate(sessions):
        (folder / f"session_{number:03}.json").write_text(json.dumps(entry))
    return folder
