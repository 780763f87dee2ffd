"""Rows from files, folders and blends."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter

import datasets
import numpy as np
import pytest

from openrlhf.datasets.jsonl import unpack_json
from openrlhf.datasets.sources import blend_indices, fingerprint_rows, load_rows, parse_probs, split_rows


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


ROWS = [{"question": f"q{i}", "n": i} for i in range(5)]


# ---- files


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_json_lines(tmp_path, name):
    rows = load_rows(write(tmp_path / name, ROWS))
    assert rows.to_list() == ROWS
    assert rows.cache_files, "expected memory-mapped rows"


@pytest.mark.parametrize(
    "document", [ROWS, {"data": ROWS, "version": 2}, pytest.param([ROWS[0]], id="one")], ids=["list", "field", "one"]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_document(tmp_path, document, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document, indent=indent))
    assert load_rows(str(path)).to_list() == (document if isinstance(document, list) else ROWS)


def test_parquet_arrow_and_saved_folder(tmp_path):
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(tmp_path / "splits")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for path in (tmp_path / "a.parquet", tmp_path / "saved", arrow, tmp_path / "splits"):
        assert load_rows(str(path)).to_list() == ROWS
    assert load_rows(str(tmp_path / "splits"), "test").to_list() == ROWS[:1]
    with pytest.raises(ValueError, match=r"'dev'.*\['test', 'train'\]"):
        load_rows(str(tmp_path / "splits"), "dev")


def test_csv_values_are_text_and_empty_ones_null(tmp_path):
    path = tmp_path / "a.csv"
    long = "x" * 200_000  # above the csv module's default limit
    path.write_text(f'\ufeffquestion,answer\n"a, ""b""\nc",007\nd,\n{long},1\n', encoding="utf-8")
    assert load_rows(str(path)).to_list() == [
        {"question": 'a, "b"\nc', "answer": "007"},
        {"question": "d", "answer": None},
        {"question": long, "answer": "1"},
    ]
    path.write_text("a,b\n1,2\n3\n")
    with pytest.raises(ValueError, match=r"a\.csv:3: expected 2 fields"):
        load_rows(str(path))
    assert len(load_rows(str(path), on_bad_row="skip")) == 1


def test_line_separators_inside_text_do_not_end_a_line(tmp_path):
    row = {"question": "a\u2028b\u2029c\u0085d\u000be\u000cf\rg\u00a0h\ufffd"}
    assert load_rows(write(tmp_path / "a.jsonl", [row, row])).to_list() == [row, row]


def test_windows_lines_blank_lines_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert load_rows(str(path)).to_list() == [{"a": 1}, {"a": 2}]


def test_types_that_differ_between_rows(tmp_path):
    rows = [
        {"predicted_answer": None, "n": 1, "mixed": 3, "nested": {"a": 1}, "odd": "text", "big": 1, "only": None},
        {"predicted_answer": "18", "n": 2.5, "mixed": "x", "nested": {"b": [1, "2"]}, "odd": [1], "big": 10**30},
        {"mixed": True, "mixed_list": [None, 1.5, 2], "late": "here"},
    ]
    loaded = load_rows(write(tmp_path / "a.jsonl", rows)).to_list()
    assert [row["predicted_answer"] for row in loaded] == [None, "18", None]
    assert [row["n"] for row in loaded] == [1.0, 2.5, None]
    assert [row["mixed"] for row in loaded] == ["3", "x", "true"]
    assert [row["nested"] for row in loaded] == [{"a": 1, "b": None}, {"a": None, "b": ["1", "2"]}, None]
    assert [unpack_json(row["odd"]) for row in loaded] == ["text", [1], None]
    assert json.loads(loaded[1]["odd"]) == [1]
    assert [row["big"] for row in loaded] == ["1", str(10**30), None]
    assert [row["only"] for row in loaded] == [None] * 3
    assert loaded[2]["mixed_list"] == [None, 1.5, 2.0] and loaded[2]["late"] == "here"


def test_text_that_looks_like_json_stays_text_beside_lists(tmp_path):
    rows = [{"a": "[1]"}, {"a": [1, {"b": "é"}]}, {"a": '{"x": 1}'}, {"a": {"x": 1}}]
    loaded = [row["a"] for row in load_rows(write(tmp_path / "a.jsonl", rows))]
    assert [unpack_json(value) for value in loaded[:1] + loaded[2:]] == ["[1]", '{"x": 1}', {"x": 1}]
    assert list(map(unpack_json, unpack_json(loaded[1]))) == [1, {"b": "é"}]


@pytest.mark.parametrize("value", [1, 1.5, True, "x", [1], {"b": 1}])
def test_object_without_fields_is_null_beside_other_values(tmp_path, value):
    loaded = load_rows(write(tmp_path / "a.jsonl", [{"a": value}, {"a": {}}])).to_list()
    assert loaded == [{"a": value}, {"a": {"b": None} if isinstance(value, dict) else None}]


def test_null_in_the_first_thousands_of_rows(tmp_path):
    rows = [{"a": None}] * 3000 + [{"a": "text"}]
    assert load_rows(write(tmp_path / "a.jsonl", rows))[3000] == {"a": "text"}


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\\ud83dy"}\n{"a": "\\ud83d\\ude00"}\n')
    assert load_rows(str(path))["a"][:] == ["x\ufffdy", "\U0001f600"]


def test_half_a_surrogate_pair_in_a_document_is_replaced(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": "x\\uD83Dy", "b": [{"c": "\\ud83d\\ude00\\udc00"}]}]')
    rows = load_rows(str(tmp_path / "a.json")).to_list()
    assert rows == [{"a": "x\ufffdy", "b": [{"c": "\U0001f600\ufffd"}]}]


def test_huge_rows(tmp_path):
    rows = [{"a": "x" * 3_000_000}, {"a": "y"}] * 3
    assert load_rows(write(tmp_path / "a.jsonl.gz", rows)).to_list() == rows


@pytest.mark.parametrize("bad", [b'{"a": 1', b"[1]", b'{"a": "\xff"}', b"nonsense", b'{"a": 1} {"a": 2}'])
def test_bad_line_is_named_or_counted(tmp_path, bad, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + bad + b'\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:3: .*--on_bad_row skip"):
        load_rows(str(path))
    for _ in range(2):  # converted, then read back
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load_rows(str(path), on_bad_row="skip").to_list() == [{"a": 1}, {"a": 2}]
        assert "1 bad rows skipped" in caplog.text and "a.jsonl:3" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_truncated_gzip_is_named(tmp_path, name):
    path = tmp_path / name
    write(path, ROWS)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=name + ": damaged or truncated"):
        load_rows(str(path))


def test_broken_document_and_columnar_files_are_named(tmp_path):
    (tmp_path / "a.json").write_text('[\n{"a": 1},\n{"a": }\n]')
    with pytest.raises(ValueError, match=r"a\.json:3"):
        load_rows(str(tmp_path / "a.json"))
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,\xff\n")
    with pytest.raises(ValueError, match=r"a\.csv: not UTF-8"):
        load_rows(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text('a,b\n1,"2\n')
    with pytest.raises(ValueError, match=r"a\.csv: not a valid csv file"):
        load_rows(str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file"):
        load_rows(str(tmp_path / "a.parquet"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a\.txt: expected a file name ending in"):
        load_rows(str(tmp_path / "a.txt"))


def test_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    assert len(load_rows(path)) == 5
    write(tmp_path / "a.jsonl", ROWS[:2])
    assert len(load_rows(path)) == 2


# ---- folders and names


def test_folder_of_files_is_joined_in_order_with_common_types(tmp_path):
    write(tmp_path / "d" / "output-1.jsonl", [{"a": None}])
    write(tmp_path / "d" / "output-2.jsonl.gz", [{"a": "x", "b": 1}])
    datasets.Dataset.from_list([{"a": "y", "b": 2.5}]).to_parquet(tmp_path / "d" / "part.parquet")
    rows = load_rows(str(tmp_path / "d")).to_list()
    assert sorted(map(str, rows)) == sorted(
        map(str, [{"a": None, "b": None}, {"a": "x", "b": 1.0}, {"a": "y", "b": 2.5}])
    )


def test_files_named_for_splits_are_kept_apart(tmp_path):
    write(tmp_path / "d" / "train-00000.jsonl", ROWS[:2])
    write(tmp_path / "d" / "train-00001.jsonl", ROWS[2:4])
    write(tmp_path / "d" / "dev.jsonl", ROWS[4:])
    assert load_rows(str(tmp_path / "d")).to_list() == ROWS[:4]
    assert load_rows(str(tmp_path / "d"), "validation").to_list() == ROWS[4:]
    with pytest.raises(ValueError, match="no files of split 'test'.*train.*validation"):
        load_rows(str(tmp_path / "d"), "test")
    assert load_rows(f"{tmp_path}@d").to_list() == ROWS[:4]


def test_numbered_split_files_are_kept_apart_and_others_named(tmp_path, caplog):
    names = ["train1", "test1", "Train_2", "val2", "eval-x", "training", "tests", "evaluation", "notes"]
    for i, name in enumerate(names):
        write(tmp_path / "d" / f"{name}.jsonl", [{"i": i}])
    with caplog.at_level(logging.WARNING):
        assert sorted(load_rows(str(tmp_path / "d"))["i"]) == [0, 2]
    assert all(f"{name}.jsonl" in caplog.text for name in names if name not in ("train1", "Train_2"))
    assert load_rows(str(tmp_path / "d"), "test")["i"][:] == [1]
    assert sorted(load_rows(str(tmp_path / "d"), "validation")["i"]) == [3, 4]


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/folder", "a/b/c", "~/no-such-file-here"])
def test_missing_path_is_one_clear_error_without_the_hub(name, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="no such file or folder"):
        load_rows(name)


def test_missing_file_in_an_existing_folder_does_not_ask_the_hub(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="no such file or folder"):
        load_rows("data/missing")


def test_hub_names_reach_the_hub(monkeypatch):
    calls = []
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["main"])
    made = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or made)
    load_rows("org/name", "test")
    load_rows("org/name@main")
    load_rows("org/name@folder")
    assert calls == [
        (("org/name", None), {"data_dir": None, "split": "test"}),
        (("org/name", "main"), {"data_dir": None, "split": "train"}),
        (("org/name", None), {"data_dir": "folder", "split": "train"}),
    ]


def test_hub_failures_name_the_source(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(RuntimeError, match="org/name: no such local file.*no network"):
        load_rows("org/name")


def test_empty_sources(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="no rows"):
        load_rows(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="no data files"):
        load_rows(str(tmp_path / "folder"))
    with pytest.raises(ValueError, match="empty entry"):
        load_rows("a.jsonl,,b.jsonl")


# ---- blends (B05)


@pytest.mark.parametrize("probs", ["0.7,0.3", "0.5,0.6,-0.1", "0,0,0", "a,b,c", "1,nan,1", "1,inf,1", ""])
def test_bad_shares_are_refused_before_anything_is_loaded(probs):
    with pytest.raises(ValueError, match="dataset_probs"):
        load_rows("x.jsonl,y.jsonl,z.jsonl", probs=probs)


def blend(tmp_path, sizes, probs, seed=0, **options):
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"source": name, "i": i} for i in range(size)])
        for name, size in zip("abc", sizes, strict=False)
    ]
    return load_rows(",".join(paths), probs=probs, seed=seed, **options)


def test_weight_zero_and_empty_source_give_no_rows(tmp_path):
    assert Counter(blend(tmp_path, [10, 10, 10], "0.5,0,0.5")["source"]) == {"a": 10, "c": 10}
    assert Counter(blend(tmp_path, [10, 0, 10], "0.4,0.2,0.4")["source"]) == {"a": 10, "c": 10}
    assert Counter(blend(tmp_path, [10, 10, 0], "0,1,0")["source"]) == {"b": 10}
    with pytest.raises(ValueError, match="no rows"):
        blend(tmp_path, [10, 0, 0], "0,1,0")


def test_shares_are_met_and_no_row_comes_twice():
    # 7,000 rows at share 0.7 allow 10,000 in all: 3,000 of the 5,000 others
    picked = blend_indices([7000, 5000], [0.7, 0.3], seed=0)
    assert len(picked) == len(set(picked.tolist())) == 10_000
    assert abs(np.mean(picked < 7000) - 0.7) < 0.02
    first = picked[:1000] < 7000
    assert abs(first.mean() - 0.7) < 0.05  # mixed, not one source after the other


def test_same_seed_same_order(tmp_path):
    one, two, other = (blend(tmp_path, [20, 20], "0.5,0.5", seed).to_list() for seed in (3, 3, 4))
    assert one == two != other
    assert sorted(map(str, one)) == sorted(map(str, other))


def test_no_shares_means_all_rows_in_order(tmp_path):
    rows = blend(tmp_path, [3, 2], None)
    assert rows["source"][:] == ["a", "a", "a", "b", "b"]


def test_one_source_with_a_share_is_taken_whole(tmp_path):
    assert blend(tmp_path, [4], "1.0")["i"][:] == [0, 1, 2, 3]
    assert parse_probs("2,6", 2) == [0.25, 0.75]


def test_max_samples_draws_from_the_whole_in_order(tmp_path):
    rows = blend(tmp_path, [50, 50], None, max_samples=20)
    assert len(rows) == 20 and set(rows["source"]) == {"a", "b"}
    order = [(row["source"], row["i"]) for row in rows]
    assert order == sorted(set(order))
    assert blend(tmp_path, [50, 50], None, max_samples=20).to_list() == rows.to_list()
    assert len(blend(tmp_path, [3], None, max_samples=20)) == 3
    with pytest.raises(ValueError, match="max_samples"):
        blend(tmp_path, [3], None, max_samples=0)


def test_sources_with_other_columns_are_filled_with_null(tmp_path):
    one = write(tmp_path / "one.jsonl", [{"prompt": "p", "margin": 1}])
    two = write(tmp_path / "two.jsonl", [{"prompt": "q", "id": "x"}, {"prompt": "r", "id": None}])
    assert load_rows(f"{one},{two}").to_list() == [
        {"prompt": "p", "margin": 1, "id": None},
        {"prompt": "q", "margin": None, "id": "x"},
        {"prompt": "r", "margin": None, "id": None},
    ]


# ---- splits and fingerprints


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 0.9])
def test_split_takes_whole_questions_out(fraction):
    rows = datasets.Dataset.from_list([{"question": f"q{i // 4}", "i": i} for i in range(200)])
    train, held_out = split_rows(rows, fraction, seed=1)
    assert sorted(train["i"][:] + held_out["i"][:]) == list(range(200))
    assert not set(train["question"]) & set(held_out["question"])
    assert fraction * 200 <= len(held_out) < fraction * 200 + 4
    assert train["i"][:] == sorted(train["i"])
    again = split_rows(rows, fraction, seed=1)
    assert again[1].to_list() == held_out.to_list()
    assert split_rows(rows, fraction, seed=2)[1].to_list() != held_out.to_list()


def test_split_knows_a_question_by_any_column_and_spacing():
    spellings = [{"question": "q {}", "problem": None}, {"question": None, "problem": "q  {}"}]
    rows = [{name: text and text.format(i) for name, text in row.items()} for i in range(20) for row in spellings]
    parts = split_rows(datasets.Dataset.from_list(rows), 0.25, seed=0)
    asked = [[" ".join((row["question"] or row["problem"]).split()) for row in part] for part in parts]
    assert [len(set(part)) for part in asked] == [15, 5] and not set(asked[0]) & set(asked[1])


def test_split_keeps_equal_rows_together_and_both_sides_filled():
    rows = datasets.Dataset.from_list([{"chosen": f"{i % 3}"} for i in range(30)])
    train, held_out = split_rows(rows, 0.01, seed=0)
    assert (len(train), len(held_out)) == (20, 10) and not set(train["chosen"]) & set(held_out["chosen"])
    assert len(split_rows(rows, 0.99, seed=0)[0]) == 10
    named = split_rows(rows.add_column("topic", [i // 15 for i in range(30)]), 0.5, 0, group_columns=["topic"])
    assert [len(part) for part in named] == [15, 15]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5])
def test_split_refuses_other_shares(fraction):
    with pytest.raises(ValueError, match="eval_fraction"):
        split_rows(datasets.Dataset.from_list(ROWS), fraction, 0)


def test_split_of_one_question_is_refused():
    with pytest.raises(ValueError, match="1 different questions"):
        split_rows(datasets.Dataset.from_list([{"question": "a"}] * 5), 0.5, 0)


def test_fingerprint_follows_the_content(tmp_path):
    rows = load_rows(write(tmp_path / "a.jsonl", ROWS))
    same = load_rows(write(tmp_path / "b.jsonl", ROWS))
    assert fingerprint_rows(rows) == fingerprint_rows(same) == fingerprint_rows(rows.select([0, 1, 2, 3, 4]))
    assert fingerprint_rows(rows) == fingerprint_rows(datasets.Dataset.from_list(ROWS))
    others = [rows.select([1, 0, 2, 3, 4]), rows.select([0, 1, 2, 3]), rows.rename_column("n", "m")]
    others.append(load_rows(write(tmp_path / "c.jsonl", [*ROWS[:4], {"question": "q4", "n": 5}])))
    assert len({fingerprint_rows(rows), *map(fingerprint_rows, others)}) == 5


def test_real_files(shared_data):
    solutions = load_rows(str(shared_data / "gsm8k_solutions" / "train.jsonl"))
    assert len(solutions) == 3808 and solutions["predicted_answer"][:].count(None) == 7
    assert len(load_rows(str(shared_data / "gsm8k_pool" / "train.jsonl.gz"))) == 21705
    assert len(load_rows(str(shared_data / "gsm8k"), "test")) == 1319
    assert len(load_rows(str(shared_data / "benchmarks" / "algebra222" / "original_algebra222.csv"))) == 222
    assert len(load_rows(str(shared_data / "benchmarks" / "svamp" / "original_SVAMP.json"))) == 1000
    for path in sorted((shared_data / "generations").glob("*/*")):
        assert len(load_rows(str(path))) > 0
