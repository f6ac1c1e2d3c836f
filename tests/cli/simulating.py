"""Calls of the verbs that replay on paper, and what is expected of one that refuses its input."""

from typer.testing import CliRunner

from kvtiers.cli.main import app

ENGINE = ("--model", "llama-3.1-8b", "--hardware", "h100")


def run(*args: str):
    """Return what came of a command line."""
    return CliRunner().invoke(app, list(args))


def refused(*args: str, says: str) -> None:
    """Expect exit code 2 and a message without a traceback."""
    result = run(*args)
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert says in result.stderr
