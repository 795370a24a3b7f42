"""A release on the Hub: files first, each resumable by its content, and one commit at the end that shows them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import EnvironmentFailure, InputError, ToolError, UsageError
from release.names import BUNDLED, TRUNK
from release.origin import all_files

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Pushed:
    """What a push did. commit: its URL. deleted: files of earlier releases that this one does not have."""

    repository: str
    commit: str
    files: int
    deleted: tuple[str, ...]


def push(
    folder: Path, repository: str, message: str, *, private: bool = False, notify: Notify = lambda _: None
) -> Pushed:
    """Make a repository hold what a folder holds.

    Large files go up one after the other; what the Hub has already is not sent again, so an interrupted push goes on.
    They become visible by the commit alone. GGUF files in bundled/ and trunk/ that the folder does not have are
    deleted: they are of an earlier release. Everything else there stays. Raises ToolError.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard

    api = HfApi(library_name="convert-mtp")
    files = {f.relative_to(folder).as_posix(): f for f in all_files(folder)}
    with _errors(repository):
        ModelCard.load(folder / "README.md").validate()  # before hours of sending files
        api.create_repo(repository, private=private or None, exist_ok=True)
        there = api.list_repo_files(repository)
        stale = [name for name in there if _is_ours(name) and name not in files]
        added = [CommitOperationAdd(name, str(file)) for name, file in files.items()]
        for number, operation in enumerate(added, 1):
            if operation.path_in_repo.endswith(".gguf"):
                notify(f"{operation.path_in_repo} ({number} of {len(added)})")
                api.preupload_lfs_files(repository, [operation])
        notify("commit")
        commit = api.create_commit(
            repository, [*added, *(CommitOperationDelete(name) for name in stale)], commit_message=message
        )
    return Pushed(repository, commit.commit_url, len(added), tuple(stale))


def _is_ours(name: str) -> bool:
    return name.endswith(".gguf") and name.partition("/")[0] in {BUNDLED, TRUNK}


@contextmanager
def _errors(repository: str) -> Iterator[None]:
    from huggingface_hub import errors

    http: Any = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]  (the HTTP library's, whichever it is)
    try:
        yield
    except (http, OSError, RuntimeError, ValueError) as error:  # the library raises them all
        raise _explained(error, repository) from error


def _explained(error: Exception, repository: str) -> ToolError:
    from huggingface_hub import constants, errors

    found = " ".join(str(error).split())[:300]
    if isinstance(error, errors.HFValidationError):
        return UsageError("this is no name for a repository", expected="user/name", found=found)
    cause = error if hasattr(error, "response") else error.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
        return InputError("the Hub does not accept the card's front matter", Path("README.md"), found=found,
                          hint="its values are those of the recipe's [card] and of the source's own card")  # fmt: skip
    if status in {401, 403} or isinstance(error, errors.LocalTokenNotFoundError):
        return EnvironmentFailure(
            "the Hub does not let you write there", expected=f"a token that may write to {repository}", found=found,
            hint="set HF_TOKEN or run: hf auth login",
        )  # fmt: skip
    return EnvironmentFailure(
        "the release could not be pushed; nothing of it is visible", expected=f"{constants.ENDPOINT}/{repository}",
        found=found, hint="the same command goes on: what has arrived is not sent again",
    )  # fmt: skip
