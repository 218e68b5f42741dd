"""The command ``tvm-ext``: a module for each large subcommand, the small ones in `app`.

Not here: the work itself, which a program can ask for by itself (`relay`, `bench`, `verify`, `devices`).
Start at `app.main`.
"""


def main() -> None:
    """The console script; commands are imported when it is called."""
    from .app import main as run

    run()
