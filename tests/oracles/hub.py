"""A Hub on this machine: the endpoints that huggingface_hub asks, over folders, with faults on demand; takes uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_WHOLE = 1_000_000  # files below are plain git, those above large files on another host


class FakeHub:
    """Repositories by id. faults: by file name, what goes wrong with the next answers; requests: what was asked."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.private: dict[str, str] = {}  # id -> token
        self.gated: set[str] = set()
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.requests: list[tuple[str, str, str]] = []  # method, path, Range
        self.sent: dict[str, int] = defaultdict(int)
        self.leaked: list[str] = []
        self.root: Path | None = None  # where repositories are made; None: nobody may
        self.token = ""  # that may write
        self.large: dict[str, bytes] = {}  # uploaded, by SHA-256, whether a commit has them or not
        self.commits: list[str] = []  # their messages

        class Handler(_Handler):
            hub = self

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(("POST", path, ""))
        if path == "/api/validate-yaml":
            bad = "license: no-such" in json.loads(body)["content"]
            errors = [{"message": "license is not one of those that there are"}] if bad else []
            self._plain(400 if bad else 200, {"Content-Type": "application/json"},
                        json.dumps({"errors": errors, "warnings": []}).encode())  # fmt: skip
        elif self.hub.root is None or self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._plain(401 if not self.headers.get("Authorization") else 403)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [
                {"path": f["path"], "shouldIgnore": False, "uploadMode": _mode(f)} for f in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            self._json({"transfer": "basic", "objects": [self._wanted(o) for o in json.loads(body)["objects"]]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._plain(404)

    def do_PUT(self) -> None:
        """A large file, by its hash."""
        oid = self.path.rpartition("/")[2]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.requests.append(("PUT", oid, ""))
        if self.hub.faults["PUT"]:
            self._plain(int(self.hub.faults["PUT"].pop(0)))
            return
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.large[oid] = body
        self._plain(200)

    def _create(self, asked: dict[str, str]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        exists = name in self.hub.folders
        if not exists:
            assert self.hub.root is not None
            self.hub.folders[name] = self.hub.root / name
            self.hub.folders[name].mkdir(parents=True)
        answer = json.dumps({"url": f"{self.hub.url}/{name}", "name": name, "id": "1"}).encode()
        self._plain(409 if exists else 200, {"Content-Type": "application/json"}, answer)

    def _wanted(self, item: dict[str, object]) -> dict[str, object]:
        """What is here already gets no place to be sent to."""
        oid = str(item["oid"])
        place = {} if oid in self.hub.large else {"actions": {"upload": {"href": f"{self.hub.url}/large/{oid}"}}}
        return {"oid": oid, "size": item["size"], **place}

    def _commit(self, repository: str, lines: list[dict[str, dict[str, str]]]) -> None:
        folder = self.hub.folders[repository]
        for line in lines:
            kind, value = str(line["key"]), line["value"]
            if kind == "header":
                self.hub.commits.append(value["summary"])
                continue
            file = folder / value["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                file.write_bytes(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                file.write_bytes(self.hub.large[value["oid"]])
            else:
                assert kind == "deletedFile"
                file.unlink()
        self._json({"commitUrl": f"{self.hub.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._api(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        elif path.startswith("/cdn/"):
            if self.headers.get("Authorization"):
                self.hub.leaked.append(path)
            repository, name = re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path).groups()  # type: ignore[union-attr]
            self._file(self.hub.folders[repository] / name)
        else:
            self._plain(404)

    def _allowed(self, repository: str) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository in self.hub.gated:
            self._plain(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."})
        elif self.hub.private.get(repository, token) != token or (repository not in self.hub.folders and not token):
            self._plain(401, {"X-Error-Message": "Invalid username or password."})
        elif repository not in self.hub.folders:
            self._plain(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        else:
            return True
        return False

    def _api(self, repository: str, kind: str | None, revision: str | None) -> None:
        if not self._allowed(repository):
            return
        if revision not in {None, "main", COMMIT}:
            self._plain(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        folder = self.hub.folders[repository]
        files = sorted(f for f in folder.rglob("*") if f.is_file())
        if kind == "tree":
            entries = [_entry(f, folder) for f in files]
            self._json([{"type": "file", "path": e.pop("rfilename"), "oid": e.pop("blobId")} | e for e in entries])
        else:
            self._json({"_id": "1", "id": repository, "modelId": repository, "sha": COMMIT, "private": False,
                        "siblings": [_entry(f, folder) for f in files]})  # fmt: skip

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        if not self._allowed(repository):
            return
        file = self.hub.folders[repository] / name
        if revision not in {"main", COMMIT}:
            self._plain(404, {"X-Error-Code": "RevisionNotFound"})
        elif not file.is_file():
            self._plain(404, {"X-Error-Code": "EntryNotFound"})
        elif file.stat().st_size < _WHOLE:
            self._file(file)
        else:
            elsewhere = f"http://localhost:{self.hub.port}/cdn/{repository}/{name}"
            self._plain(302, {"Location": elsewhere, "X-Repo-Commit": COMMIT, "X-Linked-ETag": f'"{_sha256(file)}"',
                              "X-Linked-Size": str(file.stat().st_size)})  # fmt: skip

    def _file(self, file: Path) -> None:
        data = file.read_bytes()
        first, stop, status = 0, len(data), 200
        fault = ""
        if self.command == "GET" and self.hub.faults[file.name]:
            fault = self.hub.faults[file.name].pop(0)
        if fault.isdigit():
            self._plain(int(fault))
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and fault != "whole":
            first, status = int(asked[1]), 206
            stop = min(stop, int(asked[2]) + 1 if asked[2] else stop)
        if fault == "short":
            stop = first + (stop - first) // 2
        self.send_response(status)
        self.send_header("ETag", f'"{_sha256(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            body = data[first:stop]
            if fault in {"broken", "gone"}:  # "gone" sends nothing of it
                self.wfile.write(body[: len(body) // 3 if fault == "broken" else 0])
                self.wfile.flush()
                self.connection.shutdown(2)
                self.close_connection = True
                return
            self.hub.sent[file.name] += len(body)
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._plain(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _plain(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _mode(file: dict[str, object]) -> str:
    return "lfs" if str(file["path"]).endswith((".gguf", ".png")) else "regular"


def _entry(file: Path, folder: Path) -> dict[str, object]:
    size = file.stat().st_size
    entry: dict[str, object] = {"rfilename": str(file.relative_to(folder)), "size": size, "blobId": _sha256(file)[:40]}
    if size >= _WHOLE:
        entry["lfs"] = {"sha256": _sha256(file), "oid": _sha256(file), "size": size, "pointerSize": 134}
    return entry


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
