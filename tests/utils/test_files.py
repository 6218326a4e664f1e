# SPDX-License-Identifier: Apache-2.0

import pytest

from mhla_hf.utils.files import path_inside, read_json


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
        (b"[1]", "is not a JSON object but a list"),
        (b"null", "is not a JSON object but null"),
        (b"{}", "has no field 'a'"),
        (b'{"a": true}', "'a' must be an integer, and is true or false"),
        (b'{"a": "1"}', "'a' must be an integer, and is a string"),
        (b'{"a": 1, "b": [1]}', "'b' must be a string or null, and is a list"),
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
