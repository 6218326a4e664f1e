# SPDX-License-Identifier: Apache-2.0
"""Which errors are explained, and which files are hashed; `tests/hub/test_download.py` meets both over HTTP."""

import hashlib
import os
import time

import pytest

from mhla_hf.utils.locations import HubError, hub_downloads


def test_other_errors_stay():
    error = ValueError("mhla={} is wrong")
    with pytest.raises(ValueError) as raised, hub_downloads("user/model"):
        raise error
    assert raised.value is error


def blob(folder, content, name, age=0.0):
    """A file in the cache of `user/model`, and a link to it."""
    path = folder / "models--user--model/blobs" / name
    link = folder / "models--user--model/snapshots/commit/weights" / name
    for directory in (path.parent, link.parent):
        directory.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - age,) * 2)
    link.symlink_to(os.path.relpath(path, link.parent))
    return path, link


def test_new_files_are_compared_with_their_names(tmp_path):
    sha256, git = hashlib.sha256(b"content").hexdigest(), hashlib.sha1(b"blob 7\0content").hexdigest()
    kept = [
        *blob(tmp_path, b"content", sha256),
        *blob(tmp_path, b"content", git),
        *blob(tmp_path, b"content", hashlib.sha1(b"content").hexdigest()),
        *blob(tmp_path, b"partly", f"{sha256}.1234.incomplete"),
        *blob(tmp_path, b"looked at before", "0" * 64, age=60),
    ]
    with hub_downloads("user/model", tmp_path):
        pass
    with pytest.raises(HubError, match="weights/1.*, weights/2.* of user/model arrived damaged"):
        with hub_downloads("user/model", tmp_path):
            damaged = [*blob(tmp_path, b"other", "1" * 64), *blob(tmp_path, b"other", "2" * 40)]
    assert all(path.exists() for path in kept)
    assert not any(path.exists() or path.is_symlink() for path in damaged)
