# SPDX-License-Identifier: Apache-2.0
"""The HTTP API of the Hub of `hub_server.py`."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import socket
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.hub_repositories import LFS_SUFFIXES, Answer, File, Refusal, Repository


if TYPE_CHECKING:
    from tests.hub_server import HubServer

MAX_BODY = 64 * 2**20
LARGE_FILE = 10 * 2**20

REPOSITORY = r"/api/(?:models|kernels)/(?P<name>[^/]+/[^/]+)"
ROUTES = (
    ("GET", r"/api/whoami-v2", "who_am_i"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("GET", rf"{REPOSITORY}(?:/revision/(?P<revision>[^/]+))?", "describe"),
    ("GET", rf"{REPOSITORY}/refs", "list_references"),
    ("POST", rf"{REPOSITORY}/(?P<kind>branch|tag)/(?P<target>[^/]+)", "create_reference"),
    ("GET", rf"{REPOSITORY}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", "list_files"),
    ("POST", rf"{REPOSITORY}/paths-info/(?P<revision>[^/]+)", "describe_paths"),
    ("POST", rf"{REPOSITORY}/preupload/(?P<revision>[^/]+)", "choose_upload"),
    ("POST", rf"{REPOSITORY}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", r"(?:/kernels)?/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "plan_uploads"),
    ("POST", r"/storage/(?P<oid>[0-9a-f]{64})/verify", "verify_upload"),
    ("POST", r"/storage/(?P<oid>[0-9a-f]{64})/complete", "complete_upload"),
    ("PUT", r"/storage/(?P<oid>[0-9a-f]{64})(?:/(?P<part>\d+))?", "upload"),
    ("GET HEAD", r"/storage/(?P<oid>[0-9a-f]{64})", "download_object"),
    ("GET HEAD", r"(?:/kernels)?/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "download"),
)


@dataclass
class Request:
    """A request that arrived; `received` counts the bytes of its body, `status` is 0 if no answer was sent."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    received: int = 0
    status: int = 0


class Handler(http.server.BaseHTTPRequestHandler):
    """Dispatches by method and path; an address that is not listed answers 404 and is recorded."""

    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *arguments) -> None:
        pass

    def handle_request(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(address.query))
        path = urllib.parse.unquote(address.path)
        request = Request(
            self.command, path, self.query, {name.lower(): value for name, value in self.headers.items()}
        )
        with self.hub.lock:
            self.hub.requests.append(request)
            fault = next((fault for fault in self.hub.faults if fault.meets(self.command, path)), None)
        effect = fault.effect if fault else None
        if fault:
            fault.reached.set()
        if effect == "hang":
            fault.released.wait(60)
            return self.hang_up()
        self.body = self.read_body(half=effect == "drop")
        request.received = len(self.body)
        if effect == "drop" and self.command in ("PUT", "POST"):
            return self.hang_up()
        if effect == "corrupt":
            self.body = damaged(self.body)
        try:
            if isinstance(effect, int):
                raise Refusal(effect, f"injected error {effect}", fault.code, **fault.headers)
            with self.hub.lock:
                answer = self.dispatch(address.path)
        except Refusal as refusal:
            answer = refusal.answer
        if effect == "lose":
            return self.hang_up()
        request.status = answer.status
        self.send(answer, effect)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def dispatch(self, path: str) -> Answer:
        for methods, pattern, action in ROUTES:
            # Parts are unquoted after they have been told apart: revisions may hold slashes.
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split():
                parts = {key: value and urllib.parse.unquote(value) for key, value in match.groupdict().items()}
                return getattr(self, action)(**parts)
        self.hub.unknown.append((self.command, path))
        raise Refusal(404, f"this Hub has no {self.command} {path}")

    def read_body(self, half: bool = False) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts, total = [], 0
            while size := int(self.rfile.readline().strip() or b"0", 16):
                total += size
                if total > MAX_BODY:
                    raise ConnectionAbortedError("request body too large")
                parts.append(self.rfile.read(size))
                self.rfile.readline()
                if half:
                    return b"".join(parts)
            self.rfile.readline()
            return b"".join(parts)
        size = int(self.headers.get("Content-Length") or 0)
        if size > MAX_BODY:
            raise ConnectionAbortedError("request body too large")
        return self.rfile.read(size // 2 if half else size)

    def hang_up(self) -> None:
        """Closes the connection without an answer, or in the middle of one."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def send(self, answer: Answer, effect: int | str | None) -> None:
        raw = isinstance(answer.content, bytes)
        payload = answer.content if raw else json.dumps(answer.content).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/octet-stream" if raw else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if effect == "drop":
            self.wfile.write(payload[: len(payload) // 2])
            return self.hang_up()
        self.wfile.write(damaged(payload) if effect == "corrupt" and self.command == "GET" else payload)

    # Accounts

    def account(self) -> tuple[str, str]:
        """Name and role of whoever asks; both empty without a token."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token:
            return "", ""
        if token not in self.hub.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def repository(self, name: str) -> Repository:
        user, _ = self.account()
        found = self.hub.repositories.get(name)
        if found is None or (found.private and user != name.split("/")[0]):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return found

    def writable(self, name: str) -> Repository:
        user, role = self.account()
        if not user:
            raise Refusal(401, "Invalid username or password.")
        repository = self.repository(name)
        owner = user == name.split("/")[0] or self.query.get("create_pr") == "1"
        if role != "write" or not owner:
            raise Refusal(403, "you must use a write token to upload to a repository.")
        return repository

    def who_am_i(self) -> Answer:
        user, role = self.account()
        if not user:
            raise Refusal(401, "Invalid username or password.")
        return Answer({"name": user, "type": "user", "orgs": [], "auth": {"accessToken": {"role": role}}})

    # Repositories

    def create(self) -> Answer:
        user, role = self.account()
        if not user:
            raise Refusal(401, "Invalid username or password.")
        request = json.loads(self.body)
        owner = request.get("organization") or user
        name = f"{owner}/{request['name']}"
        if role != "write" or owner != user:
            raise Refusal(403, f"You don't have the rights to create a model under the namespace {owner!r}.")
        kind = request.get("type") or "model"
        url = f"{self.hub.url}/{'kernels/' if kind == 'kernel' else ''}{name}"
        if name in self.hub.repositories:
            return Answer({"error": "You already created this model repo", "url": url}, 409)
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self.hub.repositories[name] = Repository(kind, private)
        return Answer({"url": url, "name": name, "id": name})

    def validate_card(self) -> Answer:
        return Answer({"errors": [], "warnings": []})

    def describe(self, name: str, revision: str | None) -> Answer:
        repository = self.repository(name)
        sha = repository.find(revision or "main")
        files = []
        for path, file in sorted(repository.commits[sha].items()):
            large = {"sha256": file.sha256, "size": len(file.content), "pointerSize": 134}
            details = {"size": len(file.content), "blobId": file.oid, **({"lfs": large} if file.lfs else {})}
            files.append({"rfilename": path, **(details if self.query.get("blobs", "").lower() == "true" else {})})
        flags = {"private": repository.private, "gated": False, "disabled": False}
        numbers = {"tags": [], "downloads": 0, "likes": 0}
        return Answer({"_id": "0", "id": name, "modelId": name, "sha": sha, "siblings": files, **flags, **numbers})

    def list_references(self, name: str) -> Answer:
        found: dict[str, list] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
        kinds = {"refs/heads/": "branches", "refs/tags/": "tags", "refs/pr/": "pullRequests"}
        for reference, sha in self.repository(name).references.items():
            prefix = next(prefix for prefix in kinds if reference.startswith(prefix))
            entry = {"name": reference.removeprefix(prefix), "ref": reference, "targetCommit": sha}
            found[kinds[prefix]].append(entry)
        return Answer(found)

    def create_reference(self, name: str, kind: str, target: str) -> Answer:
        repository, request = self.writable(name), json.loads(self.body or b"{}")
        # A branch is named by the address, a tag by the body.
        start, label = (
            (request.get("startingPoint") or "main", target) if kind == "branch" else (target, request["tag"])
        )
        reference = f"refs/{'heads' if kind == 'branch' else 'tags'}/{label}"
        if reference in repository.references:
            raise Refusal(409, f"Reference already exists: {reference}")
        repository.references[reference] = repository.find(start)
        return Answer({})

    def list_files(self, name: str, revision: str, folder: str | None) -> Answer:
        repository = self.repository(name)
        files, prefix = repository.commits[repository.find(revision)], f"{folder}/" if folder else ""
        entries = {path: file.entry(path) for path, file in files.items() if path.startswith(prefix)}
        if folder and not entries:
            raise Refusal(404, f"{folder} does not exist on {revision!r}", "EntryNotFound")
        for path in list(entries):
            for parent in Path(path).parents:
                if len(str(parent)) >= len(prefix) and str(parent) != ".":
                    entries[str(parent)] = {"type": "directory", "path": str(parent), "oid": "0" * 40, "size": 0}
        if self.query.get("recursive", "").lower() != "true":
            entries = {path: entry for path, entry in entries.items() if "/" not in path.removeprefix(prefix)}
        listed, first = [entry for _, entry in sorted(entries.items())], int(self.query.get("cursor", 0))
        following = first + self.hub.page_size
        if following >= len(listed):
            return Answer(listed[first:])
        query = urllib.parse.urlencode({**self.query, "cursor": following})
        link = f'<{self.hub.url}{urllib.parse.urlsplit(self.path).path}?{query}>; rel="next"'
        return Answer(listed[first:following], headers={"Link": link})

    def describe_paths(self, name: str, revision: str) -> Answer:
        repository = self.repository(name)
        files = repository.commits[repository.find(revision)]
        text = self.body.decode()
        paths = json.loads(text)["paths"] if text.startswith("{") else urllib.parse.parse_qs(text).get("paths", [])
        return Answer([files[path].entry(path) for path in paths if path in files])

    # Uploads

    def choose_upload(self, name: str, revision: str) -> Answer:
        repository = self.writable(name)
        present = repository.commits[repository.find(revision)]

        def choose(path: str, size: int, sample: str) -> dict[str, Any]:
            large = path.endswith(LFS_SUFFIXES) or size > LARGE_FILE or b"\0" in base64.b64decode(sample)
            file = present.get(path)
            known = {"oid": file.sha256 if file.lfs else file.oid} if file else {}
            return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **known}

        return Answer({"files": [choose(**file) for file in json.loads(self.body)["files"]]})

    def plan_uploads(self, name: str) -> Answer:
        self.query["create_pr"] = "1"  # Whoever may open a pull request may upload: the address does not say which.
        self.writable(name)
        objects, transfer = [], "basic"
        for wanted in json.loads(self.body)["objects"]:
            url = f"{self.hub.storage_url}/storage/{wanted['oid']}"
            upload = {"href": url, "header": {}}
            if wanted["size"] > self.hub.part_size:
                transfer, parts = "multipart", -(-wanted["size"] // self.hub.part_size)
                numbered = {f"{part:05d}": f"{url}/{part}" for part in range(1, parts + 1)}
                upload = {"href": f"{url}/complete", "header": {"chunk_size": str(self.hub.part_size), **numbered}}
            verify = {"href": f"{self.hub.url}/storage/{wanted['oid']}/verify", "header": {}}
            present = wanted["oid"] in self.hub.objects
            objects.append(wanted if present else {**wanted, "actions": {"upload": upload, "verify": verify}})
        return Answer({"transfer": transfer, "objects": objects})

    def store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, "The content does not match its SHA-256 checksum.", "BadDigest")
        self.hub.objects[oid] = content

    def upload(self, oid: str, part: str | None) -> Answer:
        if part is None:
            self.store(oid, self.body)
        else:
            self.hub.parts[oid, int(part)] = self.body
        return Answer(headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def complete_upload(self, oid: str) -> Answer:
        parts = [self.hub.parts[oid, entry["partNumber"]] for entry in json.loads(self.body)["parts"]]
        self.store(oid, b"".join(parts))
        return Answer({})

    def verify_upload(self, oid: str) -> Answer:
        content = self.hub.objects.get(oid)
        if content is None or len(content) != json.loads(self.body)["size"]:
            raise Refusal(404, "Object not found")
        return Answer({})

    def commit(self, name: str, revision: str) -> Answer:
        repository = self.writable(name)
        parent = repository.find(revision)
        files, title, reference = dict(repository.commits[parent]), "", repository.reference(revision)
        for line in self.body.splitlines():
            entry = json.loads(line)
            kind, value = entry["key"], entry["value"]
            if kind == "header":
                title = value["summary"]
                expected = value.get("parentCommit")
                if expected and not parent.startswith(expected):
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            elif kind == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refusal(400, "LFS pointer pointed to a file that does not exist.")
                files[value["path"]] = File(self.hub.objects[value["oid"]], lfs=True)
            elif kind == "deletedFile":
                files.pop(value["path"], None)
            elif kind == "deletedFolder":
                files = {path: file for path, file in files.items() if not path.startswith(f"{value['path']}/")}
        pull_request = {}
        if self.query.get("create_pr") == "1":
            number = 1 + sum(known.startswith("refs/pr/") for known in repository.references)
            reference = f"refs/pr/{number}"
            repository.references[reference] = parent
            pull_request = {"pullRequestUrl": f"{self.hub.url}/{name}/discussions/{number}"}
        if reference is None:
            raise Refusal(404, f"{revision} is no branch", "RevisionNotFound")
        sha = repository.add_commit(reference, files, title)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        return Answer({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": "", **pull_request})

    # Downloads

    def download(self, name: str, revision: str, path: str) -> Answer:
        repository = self.repository(name)
        sha = repository.find(revision)
        file = repository.commits[sha].get(path)
        commit = {"X-Repo-Commit": sha}
        if file is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", **commit)
        if not file.lfs:
            return self.serve(file.content, file.oid, **commit)
        linked = {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
        location = {"Location": f"{self.hub.storage_url}/storage/{file.sha256}"}
        return Answer(status=302, headers={**commit, **linked, **location})

    def download_object(self, oid: str) -> Answer:
        if oid not in self.hub.objects:
            raise Refusal(404, "Object not found")
        return self.serve(self.hub.objects[oid], oid)

    def serve(self, content: bytes, tag: str, **headers: str) -> Answer:
        """The content, or the part of it that was asked for."""
        headers = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes", **headers}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return Answer(content, headers=headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            raise Refusal(416, "Range not satisfiable", **{"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return Answer(content[first : last + 1], 206, headers)


def damaged(content: bytes) -> bytes:
    """Content of the same length whose second half is different."""
    half = len(content) // 2
    return content[:half] + bytes(byte ^ 0xFF for byte in content[half:])
