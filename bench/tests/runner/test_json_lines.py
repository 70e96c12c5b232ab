"""Files of JSON lines after a kill."""

import pytest

from kalmix import ArgumentError
from kalmix_bench.runner.json_lines import append_rows, read_lines, read_rows


def test_rows_are_read_in_order(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    assert read_rows(path) == []
    append_rows(path, [{"a": 1}, {"a": 2}])
    append_rows(path, [{"a": 3}])
    assert read_rows(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_line_that_was_cut_off_is_skipped_and_the_next_row_starts_on_a_new_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"a": 1}, {"a": 2}])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.warns(UserWarning, match=r"skipping line 2 of .*rows.jsonl"):
        assert read_rows(path) == [{"a": 1}]
    append_rows(path, [{"a": 3}])
    with pytest.warns(UserWarning, match="skipping line 2"):
        assert list(read_lines(path)) == [(1, {"a": 1}), (3, {"a": 3})]


@pytest.mark.parametrize(("content", "says"), [(b"\xff\xfe", "not UTF-8"), (b"1\n", "line 1 is not a result")])
def test_other_files_are_refused(tmp_path, content, says):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ArgumentError, match=says):
        read_rows(tmp_path / "rows.jsonl")
