# SPDX-License-Identifier: Apache-2.0

import os
from pathlib import Path

import pytest

from mhla_hf.utils.files import list_files, path_inside, read_json


def test_reads_an_object_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, "b": 2}')
    assert read_json(path, "the record", required={"a": int}, optional={"b": float, "c": str}) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON"),
        (b"\xff\xfe\x00", "cannot be read .*utf-8"),
        (b"[1]", "is not a JSON object but list"),
        (b"null", "is not a JSON object but NoneType"),
        (b"{}", "has no field 'a'"),
        (b'{"a": true}', "'a' must be int, and is bool"),
        (b'{"a": "1"}', "'a' must be int, and is str"),
        (b'{"a": 1, "b": [1]}', "'b' must be str or NoneType, and is list"),
    ],
    ids=lambda value: value[:12].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_refuses_what_is_not_the_expected_json(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(path, "the record", required={"a": int}, optional={"b": (str, type(None))})
    assert str(path) in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b", "C:\\x", "C:x", "a\\..\\x", 3, None, "/" * 500]
)
def test_names_that_lead_out_of_a_folder_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="index.json names .* no path inside") as caught:
        path_inside(tmp_path, name, "index.json")
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_folders_that_cannot_be_read_are_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    scandir = os.scandir

    def failing(path):
        if Path(path).name == "folder":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(PermissionError, match="folder"):
        list_files(tmp_path)
