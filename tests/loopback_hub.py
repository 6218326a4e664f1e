# SPDX-License-Identifier: Apache-2.0
"""A small Hub on 127.0.0.1: what pushing a model and loading it again need of the real one's HTTP API.

Repositories live in memory, uploads go inline into the commit (no LFS), every revision is the newest one. Kernels
have branches besides. Standard library only. Use it as a context manager and give its `environment` to the process
that is to talk to it: the address is read when `huggingface_hub` is imported.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse


MAX_BODY = 64 * 2**20
MAX_TOTAL = 256 * 2**20


class Repository:
    """Files of one repository by path."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.branches = ["main"]

    @property
    def revision(self) -> str:
        digests = [(path, hashlib.sha256(content).hexdigest()) for path, content in sorted(self.files.items())]
        return hashlib.sha1(repr(digests).encode()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Dispatches by method and path; an address that is not listed answers 404 and is recorded."""

    protocol_version = "HTTP/1.1"
    ROUTES = (
        ("GET", r"/api/whoami-v2", "who_am_i"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_card"),
        ("GET", r"/api/(?:models|kernels)/(?P<name>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?", "describe"),
        ("GET", r"/api/kernels/(?P<name>[^/]+/[^/]+)/refs", "list_branches"),
        ("POST", r"/api/kernels/(?P<name>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)", "create_branch"),
        ("GET", r"/api/(?:models|kernels)/(?P<name>[^/]+/[^/]+)/tree/[^/]+(?:/(?P<folder>.+))?", "list_files"),
        ("POST", r"/api/(?:models|kernels)/(?P<name>[^/]+/[^/]+)/preupload/[^/]+", "choose_upload"),
        ("POST", r"/api/(?:models|kernels)/(?P<name>[^/]+/[^/]+)/commit/[^/]+", "commit"),
        ("GET HEAD", r"(?:/kernels)?/(?P<name>[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)", "download"),
    )

    @property
    def hub(self) -> "LoopbackHub":
        return self.server.hub

    def log_message(self, *arguments) -> None:
        pass

    def handle_request(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.body = self.read_body()
        with self.hub.lock:
            for methods, pattern, action in self.ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in methods.split():
                    self.hub.requests.append((self.command, path))
                    return getattr(self, action)(**match.groupdict())
            self.hub.unknown.append((self.command, path))
        self.fail("NotFound", f"this Hub has no {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts, total = [], 0
            while size := int(self.rfile.readline().strip() or b"0", 16):
                total += size
                if total > MAX_BODY:
                    raise ConnectionAbortedError("request body too large")
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        size = int(self.headers.get("Content-Length") or 0)
        if size > MAX_BODY:
            raise ConnectionAbortedError("request body too large")
        return self.rfile.read(size)

    def answer(self, content, status: int = 200, **headers: str) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if content is payload else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def fail(self, code: str, message: str, status: int = 404, **headers: str) -> None:
        self.answer({"error": message}, status, X_Error_Code=code, X_Error_Message=message, **headers)

    def repository(self, name: str) -> "Repository | None":
        found = self.hub.repositories.get(name)
        if found is None:
            self.fail("RepoNotFound", "Repository not found")
        return found

    def who_am_i(self) -> None:
        token = {"accessToken": {"role": "write"}}
        self.answer({"name": self.hub.user, "type": "user", "orgs": [], "auth": token})

    def create(self) -> None:
        request = json.loads(self.body)
        name = f"{request.get('organization') or self.hub.user}/{request['name']}"
        url = f"{self.hub.url}/{'kernels/' if request.get('type') == 'kernel' else ''}{name}"
        if name in self.hub.repositories:
            return self.answer({"error": "You already created this model repo", "url": url}, 409)
        self.hub.repositories[name] = Repository()
        self.answer({"url": url, "name": name, "id": name})

    def validate_card(self) -> None:
        self.answer({"errors": [], "warnings": []})

    def describe(self, name: str, revision: "str | None" = None) -> None:
        if repository := self.repository(name):
            if revision and revision.startswith("v") and revision not in repository.branches:
                return self.fail("RevisionNotFound", "Invalid rev id")
            files = [{"rfilename": path} for path in sorted(repository.files)]
            flags = {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
            self.answer(
                {"_id": "0", "id": name, "modelId": name, "sha": repository.revision, "siblings": files, **flags}
            )

    def list_branches(self, name: str) -> None:
        if repository := self.repository(name):
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": repository.revision}
                for branch in repository.branches
            ]
            self.answer({"branches": branches, "tags": [], "converts": []})

    def create_branch(self, name: str, branch: str) -> None:
        if repository := self.repository(name):
            repository.branches.append(branch)
            self.answer({})

    def list_files(self, name: str, folder: "str | None") -> None:
        if repository := self.repository(name):
            prefix = f"{folder}/" if folder else ""
            entries = {
                path: {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in sorted(repository.files.items())
                if path.startswith(prefix)
            }
            if "recursive=true" not in self.path.lower():
                paths = {f"{prefix}{path.removeprefix(prefix).split('/')[0]}" for path in entries}
                folder_of = {"type": "directory", "oid": "0" * 40}
                entries = {path: entries.get(path, {**folder_of, "path": path}) for path in sorted(paths)}
            self.answer(list(entries.values()))

    def choose_upload(self, name: str) -> None:
        if self.repository(name):
            files = json.loads(self.body)["files"]
            self.answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )

    def commit(self, name: str) -> None:
        if not (repository := self.repository(name)):
            return
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                if sum(len(file) for file in repository.files.values()) + len(content) > MAX_TOTAL:
                    return self.fail("TooLarge", "repository too large", 413)
                repository.files[entry["value"]["path"]] = content
            elif entry["key"] == "deletedFile":
                repository.files.pop(entry["value"]["path"], None)
        url = f"{self.hub.url}/{name}/commit/{repository.revision}"
        self.answer({"success": True, "commitOid": repository.revision, "commitUrl": url, "hookOutput": ""})

    def download(self, name: str, path: str) -> None:
        if not (repository := self.repository(name)):
            return
        content = repository.files.get(path)
        if content is None:
            return self.fail("EntryNotFound", "Entry not found", X_Repo_Commit=repository.revision)
        digest = hashlib.sha256(content).hexdigest()
        self.answer(content, X_Repo_Commit=repository.revision, ETag=f'"{digest}"')


class LoopbackHub:
    """The server; `repositories`, `requests` and `unknown` tell what happened.

    Args:
        user: Name of the only account.
    """

    def __init__(self, user: str = "user") -> None:
        self.user = user
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, home) -> dict[str, str]:
        """Variables that point `huggingface_hub` here, with its cache under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": "loopback",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def __enter__(self) -> "LoopbackHub":
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(timeout=10)
