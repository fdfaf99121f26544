from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from opd.config.schema import ColumnsConfig, FileSource, HubSource, Source
from opd.data import check_disjoint, load_problems
from opd.errors import OpdError
from opd.types import Problem

ROWS = [
    {"problem": "What is 2 + 2?", "solution": "2 + 2 = 4", "answer": "4"},
    {"problem": "What is 3 + 3?", "solution": "3 + 3 = 6", "answer": "6"},
]


def file(path: Path, **options: Any) -> FileSource:
    return FileSource(name="file", path=path, **options)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, rows)
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    elif suffix == ".csv":
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path, suffix: str) -> None:
    loaded = load_problems(file(write(tmp_path, suffix, ROWS)))
    assert [(p.problem, p.solution, p.answer) for p in loaded.problems] == [tuple(row.values()) for row in ROWS]
    assert loaded.num_rows == 2
    assert loaded.dropped == {}


def test_json_may_hold_its_rows_under_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": ROWS, "version": 1}))
    assert [p.id for p in load_problems(file(path)).problems] == ["rows.json[0]", "rows.json[1]"]
    path.write_text(json.dumps({"rows": ROWS}))
    with pytest.raises(OpdError, match="not a list of rows"):
        load_problems(file(path))


def test_broken_jsonl_line_is_named_or_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + '{"problem": "half' + "\n" + json.dumps(ROWS[1]) + "\n")
    with pytest.raises(OpdError, match=r"rows\.jsonl:3 is a bad row") as caught:
        load_problems(file(path))
    assert "broken JSON" in caught.value.why
    loaded = load_problems(file(path), on_bad_row="drop")
    assert [p.id for p in loaded.problems] == ["rows.jsonl:1", "rows.jsonl:4"]
    assert loaded.num_rows == 3
    assert loaded.dropped["broken JSON"].count == 1
    assert loaded.dropped["broken JSON"].rows == ("rows.jsonl:3",)


def test_a_file_without_one_readable_line_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(OpdError, match=r"rows\.jsonl:1 is a bad row"):
        load_problems(file(path))
    with pytest.raises(OpdError, match="holds no problem"):
        load_problems(file(path), on_bad_row="drop")


def test_broken_json_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n{"problem": "a"},\n{"problem": }\n]')
    with pytest.raises(OpdError, match=r"rows\.json:3: broken JSON"):
        load_problems(file(path))


def test_csv_keeps_text_as_it_is_and_names_the_line_on_which_a_row_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('problem,answer\n"two\nlines",007\nshort\nNA,1.10\n')
    loaded = load_problems(file(path), on_bad_row="drop")
    assert [(p.id, p.problem, p.answer) for p in loaded.problems] == [
        ("rows.csv:2", "two\nlines", "007"),
        ("rows.csv:5", "NA", "1.10"),
    ]
    assert loaded.dropped["not as many cells as the header has columns"].rows == ("rows.csv:4",)


def test_csv_holds_cells_longer_than_the_csv_module_allows_by_itself(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    path = tmp_path / "rows.csv"
    path.write_text(f"problem\n{'x' * (limit + 1)}\n")
    assert len(load_problems(file(path)).problems[0].problem) == limit + 1
    assert csv.field_size_limit() == limit


# ---- columns -------------------------------------------------------------------------------------------------------


def test_other_names_are_understood_and_the_rest_is_metadata(tmp_path: Path) -> None:
    rows = [{"id": 7, "question": "q", "rationale": "r", "final_answer": 42, "level": 3}]
    problem = load_problems(file(write_jsonl(tmp_path / "rows.jsonl", rows))).problems[0]
    assert problem == Problem("7", "q", "r", "42", metadata={"level": 3})


def test_two_columns_for_one_field_must_be_settled(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "p", "question": "q"}])
    with pytest.raises(OpdError, match="two columns could be the problem"):
        load_problems(file(path))
    loaded = load_problems(file(path, columns=ColumnsConfig(problem="question")))
    assert loaded.problems[0].problem == "q"
    assert loaded.problems[0].metadata == {"problem": "p"}


def test_problem_beside_messages_must_be_settled(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "p", "messages": [{"role": "user", "content": "m"}]}])
    with pytest.raises(OpdError, match="text or a conversation"):
        load_problems(file(path))
    assert load_problems(file(path, columns=ColumnsConfig(messages="messages"))).problems[0].problem == "m"
    assert load_problems(file(path, columns=ColumnsConfig(problem="problem"))).problems[0].messages is None


def test_missing_columns_name_the_file_what_exists_and_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problm": "p", "solution": "s"}])
    with pytest.raises(OpdError, match=r"rows\.jsonl: no column holds the problem") as caught:
        load_problems(file(path))
    assert "problm, solution" in caught.value.why
    assert "did you mean 'problm'" in caught.value.fix
    with pytest.raises(OpdError, match="no column 'solutions'") as caught:
        load_problems(file(path, columns=ColumnsConfig(problem="problm", solution="solutions")))
    assert "did you mean 'solution'" in caught.value.fix


def test_one_column_cannot_be_two_things(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "p"}])
    with pytest.raises(OpdError, match="two things"):
        load_problems(file(path, columns=ColumnsConfig(problem="problem", answer="problem")))


# ---- rows ----------------------------------------------------------------------------------------------------------


def load_one(tmp_path: Path, row: dict[str, Any]) -> Problem:
    return load_problems(file(write_jsonl(tmp_path / "rows.jsonl", [row]))).problems[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": " \n"}, "empty problem"),
        ({"problem": None, "answer": "1"}, "no problem"),
        ({"problem": ["p"]}, "problem is not text"),
        ({"problem": "p", "solution": ""}, "empty solution"),
        ({"problem": "p", "solution": 3}, "solution is not text"),
        ({"problem": "p", "answer": " "}, "empty answer"),
        ({"problem": "p", "answer": [4]}, "answer is neither text nor a number"),
        ({"problem": "p", "answer": True}, "answer is neither text nor a number"),
        ({"problem": "p", "answer": float("nan")}, "answer is not a finite number"),
        ({"problem": "p", "answer": "steps\n#### "}, "empty answer after ####"),
        ({"problem": "a\ud800b"}, "lone surrogate in problem"),
        ({"problem": "a\0b"}, "NUL character in problem"),
        ({"problem": "p", "extra": [{"deep": "\udfff"}]}, "lone surrogate in column 'extra'"),
        ({"messages": []}, "messages is not a list of chat messages"),
        ({"messages": "hello"}, "messages is not a list of chat messages"),
        ({"messages": [{"from": "human", "value": "q"}]}, "a message whose role is not system, user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message is not text"),
        ({"messages": [{"role": "user"}]}, "a message without content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the conversation's question is not a user message"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "system", "content": "s"}]},
            "a system message that is not the first",
        ),
        (
            {
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                "solution": "s",
            },
            "a solution column and an assistant's last message are two solutions",
        ),
    ],
)
def test_bad_rows_are_named_with_their_reason(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(OpdError, match=r"rows\.jsonl:1 is a bad row") as caught:
        load_one(tmp_path, row)
    assert caught.value.why == reason


@pytest.mark.parametrize(
    ("answer", "text"),
    [(42, "42"), (0.1, "0.1"), (-0.0, "-0.0"), (1e22, "1e+22"), (2**70, str(2**70)), (None, None), ("007", "007")],
)
def test_numbers_become_text_of_the_same_value(tmp_path: Path, answer: Any, text: str | None) -> None:
    assert load_one(tmp_path, {"problem": "p", "answer": answer}).answer == text


def test_gsm8k_answers_are_split(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "Each has 6.\n7 * 6 = <<7*6=42>>42\n#### 1,042"}
    problem = load_one(tmp_path, row)
    assert problem.solution == "Each has 6.\n7 * 6 = <<7*6=42>>42"
    assert problem.answer == "1,042"
    assert load_one(tmp_path, {"question": "q", "answer": "#### 5"}) == Problem("rows.jsonl:1", "q", None, "5")
    kept = load_one(tmp_path, {"question": "q", "solution": "s", "answer": "a\n#### 5"})
    assert (kept.solution, kept.answer) == ("s", "a\n#### 5")


def test_conversations_end_with_the_user_and_a_last_reply_is_the_solution(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    problem = load_one(tmp_path, {"messages": messages})
    assert problem.messages == tuple(messages[:4])
    assert (problem.problem, problem.solution) == ("2 + 2?", "4")


def test_first_few_dropped_rows_are_named_and_all_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": ""}] * 5 + [{"problem": "p"}])
    dropped = load_problems(file(path), on_bad_row="drop").dropped["empty problem"]
    assert dropped.count == 5
    assert dropped.rows == ("rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3")


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_an_id_that_comes_twice_is_an_error(tmp_path: Path, on_bad_row: Any) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": 1, "problem": "p"}, {"id": "1", "problem": "q"}])
    with pytest.raises(OpdError, match="the id '1' comes twice"):
        load_problems(file(path), on_bad_row=on_bad_row)


def test_fewer_problems_than_asked_for_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"problem": ""}])
    assert len(load_problems(file(path, num_problems=2)).problems) == 2
    with pytest.raises(OpdError, match="fewer than 3 problems") as caught:
        load_problems(file(path, num_problems=3), on_bad_row="drop")
    assert "3 rows, 2 good (dropped: 1 x empty problem)" in caught.value.why
    assert "num_problems=2" in caught.value.fix


def test_a_missing_file_names_its_nearest_neighbour(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(OpdError, match="cannot be read") as caught:
        load_problems(file(tmp_path / "trian.jsonl"))
    assert "train.jsonl" in caught.value.fix
    with pytest.raises(OpdError, match="not known"):
        load_problems(file(tmp_path / "train.jsnl"))
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(OpdError, match="not a parquet file"):
        load_problems(file(tmp_path / "bad.parquet"))


def test_shared_questions_between_splits_are_refused() -> None:
    train = [Problem("a", "What is 1?"), Problem("b", "What is 2?")]
    check_disjoint(train, [Problem("c", "What is 3?")])
    with pytest.raises(OpdError, match="not held out") as caught:
        check_disjoint(train, [Problem("c", "What is 3?"), Problem("d", " What is 2?\n")])
    assert "'d'" in caught.value.why


# ---- random text ---------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": json_values}),
    max_size=3,
)
columns = st.sampled_from(["problem", "question", "prompt", "solution", "answer", "id", "extra", "messages"])


@given(rows=st.lists(st.tuples(text, text, text), min_size=1, max_size=5), ascii_only=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_survives_jsonl(tmp_path: Path, rows: list[tuple[str, str, str]], ascii_only: bool) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for problem, solution, answer in rows:
            row = {"problem": problem, "solution": solution, "answer": answer}
            out.write(json.dumps(row, ensure_ascii=ascii_only) + "\n")
    loaded = load_problems(file(path)).problems
    assert [(p.problem, p.solution, p.answer) for p in loaded] == rows


@given(rows=st.lists(st.dictionaries(columns, json_values | messages, max_size=4) | json_values, max_size=4))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bad_rows_never_cause_anything_but_opd_error(tmp_path: Path, rows: list[Any]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    for mode in ("error", "drop"):
        try:
            loaded = load_problems(file(path), on_bad_row=mode)
        except OpdError:
            continue
        assert len(loaded.problems) + sum(dropped.count for dropped in loaded.dropped.values()) == loaded.num_rows
        for problem in loaded.problems:
            problem.problem.encode()
            assert problem.problem.strip()


@given(junk=st.binary(max_size=60), suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_table_or_an_opd_error(tmp_path: Path, junk: bytes, suffix: str) -> None:
    path = tmp_path / f"junk{suffix}"
    path.write_bytes(junk)
    with contextlib.suppress(OpdError):
        assert load_problems(file(path)).problems


# ---- hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A folder laid out like a data set's repository: one subset of two splits in parquet."""
    folder = tmp_path / "set"
    (folder / "main").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        pq.write_table(pa.Table.from_pylist(rows), folder / "main" / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n"
    )
    return folder


def test_a_folder_laid_out_like_a_hub_data_set(hub_folder: Path) -> None:
    source = HubSource(name="hub", dataset=str(hub_folder), subset="main", split="train")
    loaded = load_problems(source)
    assert [(p.problem, p.solution, p.answer) for p in loaded.problems] == [tuple(row.values()) for row in ROWS]
    assert loaded.problems[1].id == "set/main:train:1"
    assert load_problems(source.model_copy(update={"split": "test"})).num_rows == 1
    assert load_problems(source.model_copy(update={"num_problems": 1})).num_rows == 1


def test_hub_errors_say_what_was_asked_for(hub_folder: Path) -> None:
    with pytest.raises(OpdError, match="has no revision 'main'"):
        load_problems(HubSource(name="hub", dataset=str(hub_folder), subset="main", revision="main"))
    with pytest.raises(OpdError, match="split 'dev', cannot be loaded"):
        load_problems(HubSource(name="hub", dataset=str(hub_folder), subset="main", split="dev"))
    with pytest.raises(OpdError, match="cannot be loaded"):
        load_problems(HubSource(name="hub", dataset=str(hub_folder), subset="other"))
    with pytest.raises(OpdError, match="'no/such-data-set', split 'train', cannot be loaded"):
        load_problems(HubSource(name="hub", dataset="no/such-data-set"))


def test_importing_data_is_light() -> None:
    heavy = ["torch", "transformers", "datasets", "reasoning_gym", "pyarrow", "pandas"]
    code = f"import sys, opd.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_sources_are_told_apart_by_name(tmp_path: Path) -> None:
    source = TypeAdapter(Source).validate_python({"name": "file", "path": str(write_jsonl(tmp_path / "a.jsonl", ROWS))})
    assert len(load_problems(source).problems) == 2
