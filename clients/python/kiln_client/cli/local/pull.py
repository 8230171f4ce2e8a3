"""The command `kiln pull`, and the download that `kiln run` and `kiln serve` ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.filesize import decimal
from rich.text import Text

from kiln_client.cli.local.hub import Download, HubFile, download_files, hide_bars, plan_download
from kiln_client.cli.local.options import DIRECTORY, HOME, YES
from kiln_client.cli.output import Output
from kiln_client.cli.session import Session, local_command
from kiln_client.cli.signals import blocking_signals
from kiln_client.stack.home import make_home


@click.command("pull")
@click.argument("repo_id", metavar="ID")
@click.option("--revision", help="Branch, tag or commit. Default: the default branch.")
@click.option(
    "--model-root",
    "models_path",
    type=DIRECTORY,
    help="Directory of checkpoints that the files go to. Default: HOME/models.",
)
@click.option("--token", envvar="HF_TOKEN", show_envvar=True, help="Token of the Hub. Default: the one that is saved.")
@HOME
@YES
@local_command
async def pull_command(
    session: Session,
    *,
    repo_id: str,
    revision: str | None,
    models_path: Path | None,
    token: str | None,
    home: Path,
    yes: bool,
) -> None:
    """Download a checkpoint from the Hugging Face Hub.

    ID is ORG/NAME. The files go to HOME/models/ORG/NAME, so that ORG/NAME is a name for `kiln run` and for --model. If
    the command is interrupted, the next one downloads the files that are missing. HF_ENDPOINT names another server than
    the Hub.
    """
    if models_path is None:
        make_home(home)
        models_path = home / "models"
    download = pull(session.output, repo_id, models_path, revision=revision, token=token, yes=yes)
    record = {
        "event": "result",
        "model": repo_id,
        "revision": download.commit,
        "path": str(download.path),
        "downloaded_bytes": download.missing_bytes,
    }
    session.output.result(record, Text(f"{repo_id} at {download.commit[:12]} is in {download.path}"))


def pull(
    output: Output, repo_id: str, models_path: Path, *, revision: str | None = None, token: str | None = None, yes: bool
) -> Download:
    """Downloads a model into a model root, after asking unless `yes`; takes what `plan_download` takes."""
    if output.as_json or not output.remarks.is_terminal:
        hide_bars()

    def show(file: HubFile) -> None:
        output.event("download", {"file": file.name, "size_bytes": file.size_bytes})
        output.remark(f"downloading {file.name}, {decimal(file.size_bytes)}")

    try:
        with blocking_signals():
            download = plan_download(repo_id, models_path, revision=revision, token=token)
            if download.missing and not yes:
                _ask(download)
            download_files(download, show)
    except KeyboardInterrupt:
        raise click.Abort from None
    return download


def _ask(download: Download) -> None:
    size = decimal(download.missing_bytes)
    question = f"Download {download.repo_id}, {size} in {len(download.missing)} files, to {download.path}?"
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is no terminal to ask at: give --yes")
    click.confirm(question, default=True, abort=True, err=True)
