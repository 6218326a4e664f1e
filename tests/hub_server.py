# SPDX-License-Identifier: Apache-2.0
"""A small Hub on the loopback interface: what pushing and loading models need of the real one's HTTP API.

Everything is in memory; the standard library alone is used. Files of weights go to a storage of their own by the LFS
protocol, at another host name as on the real Hub, and stay there when no commit follows. Commits, branches, tags and
pull requests are real: older revisions keep their files. `HubServer.inject` makes chosen requests fail.

Use it as a context manager and give its `environment` to the process that is to talk to it: the address is read when
`huggingface_hub` is imported.
"""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.hub_api import MAX_BODY, Handler, Request
from tests.hub_repositories import Repository


@dataclass
class Fault:
    """What happens to some requests, see `HubServer.inject`; `reached` is set when the first one has arrived."""

    methods: str
    path: str
    effect: int | str
    skip: int = 0
    times: int | None = 1
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def meets(self, method: str, path: str) -> bool:
        """True if it shall happen to this request; counts those that it concerns."""
        if self.times == 0 or method not in self.methods.split() or not re.search(self.path, path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class HubServer:
    """The server; `repositories`, `objects`, `requests` and `unknown` tell what happened.

    Args:
        user: Name of the account that the environment logs in to. Another account, `reader`, has the token `reader`,
            which may not write.
    """

    def __init__(self, user: str = "user") -> None:
        self.user = user
        self.tokens = {"loopback": (user, "write"), "reader": ("reader", "read")}
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[Request] = []
        self.unknown: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.page_size = 1000
        self.part_size = MAX_BODY // 2
        self.lock = threading.Lock()
        self.handler = type("Handler", (Handler,), {"hub": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage_url = f"http://localhost:{self.server.server_port}"

    def environment(self, home, token: str = "loopback") -> dict[str, str]:
        """Variables that point `huggingface_hub` here, with its cache under `home`; no token is logged in if empty."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def inject(self, methods: str, path: str, effect: int | str, **options: Any) -> Fault:
        """Makes requests fail.

        Args:
            methods: Methods, separated by spaces.
            path: Regular expression that is searched for in the path.
            effect: A status to answer with (`code` and `headers` as options); `"drop"`, to hang up half-way through
                the body; `"corrupt"`, to change bytes of the body; `"hang"`, never to answer; `"lose"`, to do what was
                asked and hang up before the answer.
            **options: `skip`, how many requests pass first; `times`, how many fail then, `None` for all.
        """
        fault = Fault(methods, path, effect, **options)
        with self.lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Ends all faults."""
        with self.lock:
            for fault in self.faults:
                fault.released.set()
            self.faults.clear()

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """Nobody listens at its address inside."""
        address = self.server.server_address
        self.stop()
        try:
            yield
        finally:
            self.server = http.server.ThreadingHTTPServer(address, self.handler)
            self.start()

    def start(self) -> None:
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(timeout=10)

    def __enter__(self) -> HubServer:
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self.heal()
        self.stop()
