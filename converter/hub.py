"""Models by Hub id: downloaded into huggingface_hub's cache, or their shards read by ranges where they lie.

Cache, endpoint, token and offline mode are huggingface_hub's own: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from converter.checkpoint import ShardFiles
from converter.errors import CheckpointError, EnvironmentFailure, ToolError, UsageError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md", "additional_chat_templates/*"]
_WEIGHTS = ["*.safetensors"]
_ELSEWHERE = ["[!a]*/*", "a[!d]*/*"]  # other folders hold other forms of the weights
_TRIES = 5  # of a range, as long as nothing of it comes
_WAIT_S = 1.0
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Located:
    """A model's folder, or file; files: where the shards are read from, None for the folder itself."""

    path: Path
    files: ShardFiles | None = None


def is_hub_id(model: str | Path) -> bool:
    """Whether this is a string such as "Qwen/Qwen3.6-27B" that no file or folder answers to."""
    return (
        isinstance(model, str)
        and bool(_ID.fullmatch(model))
        and not model.endswith(".gguf")
        and not Path(model).exists()
    )


def locate(
    model: str | Path,
    *,
    revision: str | None = None,
    stream: bool = False,
    notify: Callable[[str, str, Mapping[str, object]], None] = lambda _name, _message, _facts: None,
) -> Located:
    """Where a model is: a path as it is, a Hub id fetched into the cache.

    revision: branch, tag or commit. stream: read shards by ranges, at a pinned commit, instead of downloading them;
    offline they come from the cache. Raises ToolError.
    """
    if not is_hub_id(model):
        if revision is not None or stream:
            raise UsageError(
                "--revision and --stream are for models on the Hub",
                Path(model),
                expected="an id such as Qwen/Qwen3.6-27B",
            )
        return Located(Path(model))
    repository = _Repository(str(model), revision)
    return repository.streamed() if stream and not _offline() else repository.downloaded(notify)


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


class _Repository:
    def __init__(self, model: str, revision: str | None) -> None:
        self.model, self.revision = model, revision

    def downloaded(self, notify: Callable[[str, str, Mapping[str, object]], None]) -> Located:
        notify("download", f"fetching {self.model} into the Hub cache", {"model": self.model})
        return Located(self._snapshot(self.revision, [*_SMALL, *_WEIGHTS]))

    def streamed(self) -> Located:
        from huggingface_hub import HfApi

        with _hub_errors(self.model, self.revision):
            info = HfApi().model_info(self.model, revision=self.revision, files_metadata=True)
        commit = info.sha or self.revision or "main"
        shards = {
            s.rfilename: RemoteFile(s.size or 0, s.lfs.sha256 if s.lfs else s.blob_id or "")
            for s in info.siblings or []
            if "/" not in s.rfilename and s.rfilename.endswith(".safetensors")
        }
        folder = self._snapshot(commit, _SMALL)
        return Located(folder, HubFiles(self.model, commit, shards))

    def _snapshot(self, revision: str | None, patterns: list[str]) -> Path:
        from huggingface_hub import snapshot_download

        with _hub_errors(self.model, revision):
            return Path(
                snapshot_download(
                    self.model, revision=revision, allow_patterns=patterns, ignore_patterns=_ELSEWHERE,
                    library_name="convert-mtp",
                )
            )  # fmt: skip


@dataclass(frozen=True)
class RemoteFile:
    """Size in bytes, and a hash of the content."""

    size: int
    stamp: str


class HubFiles:
    """Shards of one commit of a Hub repository, read by ranges; what breaks off is asked for again from there."""

    def __init__(self, model: str, commit: str, shards: Mapping[str, RemoteFile]) -> None:
        self.model, self.commit, self.shards = model, commit, shards

    def names(self) -> list[str]:
        return sorted(self.shards)

    def check(self, file: Path) -> None:
        if file.name not in self.shards:
            raise CheckpointError("the repository has no such file", file, found=f"{self.model} at {self.commit}")

    def size(self, file: Path) -> int:
        return self.shards[file.name].size

    def stamp(self, file: Path) -> str:
        return self.shards[file.name].stamp

    def read(self, file: Path, position: int, view: memoryview) -> int:
        done = tries = 0
        while done < len(view):
            got, broke = self._range(file, position + done, view[done:])
            done += got
            if not got and broke is None:
                break
            tries = 0 if got else tries + 1
            if broke is not None and tries == _TRIES:
                raise EnvironmentFailure(
                    "the connection to the Hub breaks off again and again",
                    file,
                    found=f"{type(broke).__name__}: {broke}",
                ) from broke
            if broke is not None:
                time.sleep(_WAIT_S * 2**tries)
        return done

    def close(self) -> None:
        """Connections are huggingface_hub's."""

    def _range(self, file: Path, position: int, view: memoryview) -> tuple[int, Exception | None]:
        """One request: how many bytes of the view it filled, and what ended it before its time."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        url = hf_hub_url(self.model, file.name, revision=self.commit)
        last = position + len(view) - 1
        headers = build_hf_headers(library_name="convert-mtp")
        headers |= {"Range": f"bytes={position}-{last}", "Accept-Encoding": "identity"}
        done = 0
        with (
            _hub_errors(self.model, self.commit),
            http_stream_backoff("GET", url, headers=headers, timeout=_TIMEOUT_S) as answer,
        ):
            hf_raise_for_status(answer)
            self._require_range(file, position, answer.status_code, answer.headers)
            try:  # in here: the library's loop does not take what ends a body
                for piece in answer.iter_raw():
                    part = piece[: len(view) - done]
                    view[done : done + len(part)] = part
                    done += len(part)
            except (*_http_errors(), ConnectionError, TimeoutError) as error:
                return done, error
        return done, None

    def _require_range(self, file: Path, position: int, status: int, headers: Mapping[str, str]) -> None:
        if status != 206 or not headers.get("Content-Range", "").startswith(f"bytes {position}-"):
            raise EnvironmentFailure(
                "the server does not answer requests for ranges", file, expected=f"206, bytes from {position:,}",
                found=f"{status}, {headers.get('Content-Range')}", hint="convert without --stream",
            )  # fmt: skip


def _http_errors() -> tuple[type[Exception], ...]:
    """What the HTTP library under huggingface_hub raises; versions differ in which one that is."""
    from huggingface_hub import errors

    return (errors.HTTPError,)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """What went wrong on the way to the Hub, in words."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HFValidationError, *_http_errors(), OSError) as error:
        raise _explained(error, model, revision) from error


def _explained(error: Exception, model: str, revision: str | None) -> ToolError:
    from huggingface_hub import constants, errors

    where = Path(model)
    found = " ".join(str(error).split())[:300]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return UsageError("this is neither a folder nor a Hub id", where, found=found)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return EnvironmentFailure(
            "the Hub does not let you have this model", where, found=found,
            hint=f"accept its conditions on {constants.ENDPOINT}/{model}, then set HF_TOKEN or run: hf auth login",
        )  # fmt: skip
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            "the model has no such revision", where, found=revision, hint="--revision BRANCH|TAG|COMMIT"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return CheckpointError(
            "there is no such folder, and no such model on the Hub", where, found=f"{status} from {constants.ENDPOINT}",
            hint="a private or gated model needs HF_TOKEN or: hf auth login",
        )  # fmt: skip
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return CheckpointError("the model lacks a file", where, found=found)
    if _offline():
        return EnvironmentFailure(
            "there is no such folder, and the Hub cache does not have this model", where, found="HF_HUB_OFFLINE is set",
            hint="fetch it once without HF_HUB_OFFLINE",
        )  # fmt: skip
    return EnvironmentFailure(
        "there is no such folder, and the Hub cannot be reached or its files not stored", where, found=found,
        hint=f"HF_ENDPOINT is {constants.ENDPOINT}, the cache is {constants.HF_HUB_CACHE}; "
        "a download goes on where it stopped",
    )  # fmt: skip
