"""``python -m pipemax``: the command line, even if the console script is not on PATH."""

from pipemax.cli.app import app

if __name__ == "__main__":
    app(prog_name="pipemax")
