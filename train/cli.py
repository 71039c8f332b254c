"""The `drafthead` command: its verbs in the order of work, and the entry point."""

from __future__ import annotations

import sys

import typer

from drafthead.train import (
    terminal,
    verbs_certify,
    verbs_data,
    verbs_evaluate,
    verbs_generate,
    verbs_hub,
    verbs_ship,
    verbs_train,
    verbs_tune,
)

app = typer.Typer(
    help="Train draft heads for a frozen language model, decode without loss, measure the gain.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("fetch-demo")(verbs_data.fetch_demo)
app.command()(verbs_data.audit)
app.command()(verbs_data.regenerate)
app.command()(verbs_train.estimate)
app.command()(verbs_train.extract)
app.command()(verbs_train.train)
app.command()(verbs_evaluate.evaluate)
app.command()(verbs_generate.generate)
app.command()(verbs_certify.certify)
app.command()(verbs_tune.tune)
app.command()(verbs_ship.export)
app.command("import")(verbs_ship.import_)
app.command()(verbs_hub.push)
app.command()(verbs_hub.pull)
app.command()(verbs_train.demo)


def main() -> None:
    """Entry point of the `drafthead` command."""
    terminal.set_up()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    sys.exit(terminal.run(app))


if __name__ == "__main__":
    main()
