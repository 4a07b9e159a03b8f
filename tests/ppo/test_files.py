"""A file is whole, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsync.files import replacing, write_whole


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "file"
    write_whole(path, b"before")

    def stops_half_way() -> None:
        with replacing(path) as unfinished:
            unfinished.write_bytes(b"half")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        stops_half_way()
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"before", [path])
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"after")
        assert path.read_bytes() == b"before"
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"after", [path])
