"""Downloads checkpoints from the Hugging Face Hub, or from a server that speaks its protocol (`HF_ENDPOINT`).

`huggingface_hub` does the work: it reads the user's token, goes on with a file whose connection breaks, and downloads
no file again that is there. It deletes a file that it has in part when it fails, so another process begins that file
anew (`_download_to_tmp_and_move` of release 2.4, on purpose). It is an extra, `kiln-client[hub]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kiln_client.errors import FailedPrecondition, HubFailed

_CONFIG: Final = "config.json"
_SAFETENSORS: Final = "*.safetensors"
_PICKLES: Final = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
#: What a checkpoint is made of. Other files of a repository are copies of the weights in other formats, or pictures.
_FILES: Final = ("*.json", _SAFETENSORS, *_PICKLES, "*.model", "*.jinja", "*.txt", "LICENSE*", "NOTICE*", "README.md")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a model. `name` is its path in the repository; `size_bytes` is 0 if the server does not say."""

    name: str
    size_bytes: int
    is_present: bool


@dataclass(frozen=True, slots=True)
class Download:
    """What a download brings.

    Attributes:
        commit: Commit that the revision names.
        files: Every file of the checkpoint; `config.json` comes last, so that a directory which has it is whole.
        token: Token of the user; None takes the one that `hf auth login` has saved, or `HF_TOKEN`.
    """

    repo_id: str
    commit: str
    path: Path
    files: tuple[HubFile, ...]
    token: str | None

    @property
    def missing(self) -> list[HubFile]:
        """The files that this host lacks."""
        return [file for file in self.files if not file.is_present]

    @property
    def missing_bytes(self) -> int:
        """Bytes that are to be downloaded."""
        return sum(file.size_bytes for file in self.missing)


def plan_download(repo_id: str, models_path: Path, *, revision: str | None, token: str | None) -> Download:
    """Asks the Hub what a model consists of, and looks what of it is here.

    The files go to `models_path/repo_id`. Without a revision it is the default branch, without a token the saved one.
    """
    with _translated(repo_id):
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra

        path = models_path / repo_id
        found = snapshot_download(
            repo_id, revision=revision, local_dir=path, token=token, allow_patterns=list(_FILES), dry_run=True
        )
    names = [file.filename for file in found]
    if _CONFIG not in names:
        raise HubFailed(repo_id, f"it has no {_CONFIG}: it is no model of the transformers library")
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    files = [
        HubFile(file.filename, file.file_size or 0, not file.will_download)
        for file in found
        if not (has_safetensors and _is_pickle(file.filename))
    ]
    files.sort(key=lambda file: (file.name == _CONFIG, file.name))
    return Download(repo_id, found[0].commit_hash, path, tuple(files), token)


def download_files(download: Download, on_file: Callable[[HubFile], None]) -> None:
    """Downloads what is missing, file by file. If it is interrupted, the next plan lacks the files that are there.

    `on_file` is called before each. On a terminal, `huggingface_hub` draws a bar for each.
    """
    with _translated(download.repo_id):
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - an extra

        for file in download.missing:
            on_file(file)
            hf_hub_download(
                download.repo_id, file.name, revision=download.commit, local_dir=download.path, token=download.token
            )


def hide_bars() -> None:
    """Keeps `huggingface_hub` from drawing bars, for output that is no terminal."""
    with _translated(""):
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415 - an extra

        disable_progress_bars()


def _is_pickle(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in _PICKLES)


@contextmanager
def _translated(repo_id: str) -> Iterator[None]:
    try:
        from huggingface_hub import errors  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        message = "downloads need the distribution huggingface_hub: install kiln-client[hub]"
        raise FailedPrecondition(message, reason="HUB_NOT_INSTALLED") from error
    explanations: dict[type[Exception], str] = {
        errors.GatedRepoError: "its owner must grant access first, on the model's page; then give a token",
        errors.RepositoryNotFoundError: "the Hub has no such model, or hides it: a private one needs a token",
        errors.RevisionNotFoundError: "it has no such revision",
    }
    try:
        yield
    except Exception as error:  # of its HTTP client, of the file system, of the id
        for cause in _causes(error):
            for kind, explanation in explanations.items():
                if isinstance(cause, kind):
                    raise HubFailed(repo_id, explanation) from error
        raise HubFailed(repo_id, (str(error).strip() or repr(error)).splitlines()[0]) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
