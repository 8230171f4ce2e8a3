"""What others do to files, whole or in part, while they are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final


def _list_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def rename_away(root: Path, whole: Path) -> None:
    """A folder is renamed, before another one takes its name."""
    root.rename(root.with_name(f"{root.name}.away"))


def replace_folders(root: Path, whole: Path) -> None:
    """Another folder takes the place of each."""
    for folder in list(root.iterdir()):
        if folder.is_dir():
            folder.rename(root / f"{folder.name}.old")
            shutil.copytree(whole / folder.name, folder)
            shutil.rmtree(root / f"{folder.name}.old")


def replace_files(root: Path, whole: Path) -> None:
    """Other files take the place of all, as a rename does it."""
    for path in _list_files(root):
        new = path.with_name(f"{path.name}.new")
        shutil.copyfile(path, new)
        new.replace(path)


def delete(root: Path, whole: Path) -> None:
    """Everything goes."""
    shutil.rmtree(root)


def delete_files(root: Path, whole: Path) -> None:
    """Every file goes; folders stay."""
    for path in _list_files(root):
        path.unlink()


def truncate(root: Path, whole: Path) -> None:
    """Files become half as long."""
    for path in _list_files(root):
        path.chmod(0o644)
        os.truncate(path, path.stat().st_size // 2)


def make_folders(root: Path, whole: Path) -> None:
    """Folders take the place of files."""
    for path in _list_files(root):
        path.unlink()
        path.mkdir()


def make_files(root: Path, whole: Path) -> None:
    """Files take the place of folders."""
    for path in list(root.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
            path.write_text("x")


def make_loops(root: Path, whole: Path) -> None:
    """Links that lead to themselves take the place of files."""
    for path in _list_files(root):
        path.unlink()
        path.symlink_to(path)


def make_links(root: Path, whole: Path) -> None:
    """Links to nothing take the place of folders."""
    for path in list(root.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
            path.symlink_to(root / "nothing")


def forbid(root: Path, whole: Path) -> None:
    """The reader may read nothing more; a superuser may."""
    for path in (*_list_files(root), *sorted(root.rglob("*"), reverse=True), root):
        if not path.is_symlink() and path.exists():
            path.chmod(0)


Mutation = Callable[[Path, Path], None]

#: Each takes the folder that is read, and a whole copy of it.
MUTATIONS: Final[Mapping[str, Mutation]] = {
    one.__name__: one
    for one in (
        rename_away,
        replace_folders,
        replace_files,
        delete,
        delete_files,
        truncate,
        make_folders,
        make_files,
        make_loops,
        make_links,
        forbid,
    )
}


def restore(root: Path, whole: Path) -> None:
    """Makes the folder as it was."""
    for path in (root.with_name(f"{root.name}.away"), root):
        if path.exists():
            path.chmod(0o755)
            # A folder that may not be read is listed only once its turn has come.
            for folder, names, _ in os.walk(path):
                for name in names:
                    if not (Path(folder) / name).is_symlink():
                        (Path(folder) / name).chmod(0o755)
            shutil.rmtree(path)
    shutil.copytree(whole, root)
