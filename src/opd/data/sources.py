"""Files, hub data sets and generated tasks -> `Problems`.

jsonl, json and csv are read here, so that one broken line is named by file and line and a number keeps its value;
parquet through pyarrow; hub ids, and local folders of the same layout, through `datasets`.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from opd.config.schema import FileSource, HubSource, Source, TaskSource
from opd.data.rows import BadRowError, DropCounter, Dropped, map_columns, nearest, to_problem
from opd.errors import OpdError
from opd.types import Problem

OnBadRow = Literal["error", "drop"]
MAX_CSV_CELL_BYTES = 2**30  # the csv module's own 128 KiB is less than one long worked solution


@dataclass(frozen=True)
class Problems:
    """What a source holds.

    Args:
        problems: the good rows, in the source's order.
        num_rows: rows that were looked at: all of them, or up to the one that completed `num_problems`.
        dropped: reason -> how many rows, and the names of the first few. Empty unless dropping was asked for.
    """

    problems: tuple[Problem, ...]
    num_rows: int
    dropped: dict[str, Dropped]


@dataclass(frozen=True)
class _Row:
    """One row as read: its name for errors, and its values or the reason why it could not be read."""

    name: str
    values: dict[str, Any] | BadRowError


def load_problems(source: Source, *, on_bad_row: OnBadRow = "error") -> Problems:
    """Read or generate the problems of a recipe's data source.

    Args:
        source: a task, a file or a hub data set.
        on_bad_row: `error` stops at the first bad row and names it; `drop` leaves it out and counts it.

    Raises:
        OpdError: the source cannot be read, its columns do not fit, a row is bad, an id comes twice, or fewer problems
            exist than `num_problems` asks for.
    """
    if isinstance(source, TaskSource):
        from opd.data.tasks import generate

        generated = generate(source)
        return Problems(generated, len(generated), {})
    if isinstance(source, FileSource):
        name, columns, rows = _file(source.path)
    else:
        name, columns, rows = _hub(source)
    # Without one readable row there are no columns to map: the loop below then names the first bad row.
    mapping = map_columns(source.columns, columns, source=name) if columns else {}

    problems: list[Problem] = []
    names: dict[str, str] = {}
    drops = DropCounter()
    num_rows = 0
    for row in rows:
        num_rows += 1
        try:
            if isinstance(row.values, BadRowError):
                raise row.values
            problem = to_problem(row.values, mapping, default_id=row.name)
        except BadRowError as bad:
            if on_bad_row == "error":
                raise _bad_row(row.name, str(bad)) from bad
            drops.add(str(bad), row.name)
            continue
        if problem.id in names:
            raise OpdError(
                f"{name}: the id {problem.id!r} comes twice",
                why=f"rows {names[problem.id]} and {row.name} share it, so their results could not be told apart",
                fix="make the ids unique, or rename the column so that rows are named by their place",
            )
        names[problem.id] = row.name
        problems.append(problem)
        if len(problems) == source.num_problems:
            break
    return _checked(name, Problems(tuple(problems), num_rows, drops.result()), source.num_problems)


def check_disjoint(train: Iterable[Problem], heldout: Iterable[Problem]) -> None:
    """Refuse held-out problems that are also trained on: by question, or by a task's key of equal questions.

    Raises:
        OpdError: with the number of shared questions and the first of them.
    """
    trained = {question_key(problem) for problem in train}
    shared = [problem for problem in heldout if question_key(problem) in trained]
    if shared:
        raise OpdError(
            "the held-out problems are not held out",
            why=f"{len(shared)} of them are among the training problems too, {shared[0].id!r} the first",
            fix="take splits that share no question; generated tasks need the same heldout_frac on both sides",
        )


def question_key(problem: Problem) -> str:
    """Equal for problems that give each other away: the task's key, or the question's text."""
    return str(problem.metadata.get("question_key", problem.problem.strip()))


def _bad_row(name: str, reason: str) -> OpdError:
    return OpdError(f"{name} is a bad row", why=reason, fix="mend the row, or set data.on_bad_row=drop")


def _checked(name: str, problems: Problems, wanted: int | None) -> Problems:
    num_found = len(problems.problems)
    reasons = ", ".join(f"{dropped.count} x {reason}" for reason, dropped in problems.dropped.items())
    why_fewer = f"{problems.num_rows} rows, {num_found} good" + (f" (dropped: {reasons})" if reasons else "")
    if num_found == 0:
        raise OpdError(f"{name} holds no problem", why=why_fewer, fix="check the file and the columns")
    if wanted is not None and num_found < wanted:
        raise OpdError(
            f"{name} holds fewer than {wanted} problems", why=why_fewer, fix=f"set num_problems={num_found} or less"
        )
    return problems


# ---- files ---------------------------------------------------------------------------------------------------------

_Table = tuple[str, list[str], Iterable[_Row]]  # name, columns, rows


def _file(path: Path) -> _Table:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise OpdError(
            f"{path}: this kind of file is not known",
            why=f"its name ends in {path.suffix!r}",
            fix=f"{nearest(path.suffix, list(_READERS))}use {', '.join(_READERS)}",
        )
    try:
        rows = reader(path)
    except OSError as error:
        neighbours = sorted(item.name for item in path.parent.glob("*")) if path.parent.is_dir() else []
        raise OpdError(
            f"{path} cannot be read",
            why=error.strerror or str(error),
            fix=f"{nearest(path.name, neighbours)}paths are relative to the folder that the command runs in",
        ) from error
    return str(path), _columns(row.values for row in rows), rows


def _columns(rows: Iterable[dict[str, Any] | BadRowError]) -> list[str]:
    """Every column that some row has, in the order of first appearance."""
    columns: dict[str, None] = {}
    for row in rows:
        if not isinstance(row, BadRowError):
            columns.update(dict.fromkeys(row))
    return list(columns)


def _record(value: Any) -> dict[str, Any] | BadRowError:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else BadRowError("not an object with named values")


def _read_jsonl(path: Path) -> list[_Row]:
    rows: list[_Row] = []
    # Bytes, and split at \n alone: str.splitlines would also cut at U+2028, which JSON strings may hold.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                rows.append(_Row(f"{path.name}:{number}", _parse_line(line)))
    return rows


def _parse_line(line: bytes) -> dict[str, Any] | BadRowError:
    try:
        return _record(json.loads(line.decode("utf-8")))
    except UnicodeDecodeError:
        return BadRowError("not UTF-8")
    except (ValueError, RecursionError):  # ValueError: also an integer of more than 4,300 digits
        return BadRowError("broken JSON")


def _read_json(path: Path) -> list[_Row]:
    try:
        content: Any = json.loads(_decode(path))
    except json.JSONDecodeError as error:
        raise OpdError(
            f"{path}:{error.lineno}: broken JSON",
            why=f"{error.msg} at column {error.colno}",
            fix="mend the file; if it holds one object a line, name it .jsonl",
        ) from error
    except (ValueError, RecursionError) as error:
        raise OpdError(f"{path}: broken JSON", why=str(error), fix="mend the file") from error
    if isinstance(content, dict):
        content = cast("dict[str, Any]", content).get("data")
    if not isinstance(content, list):
        raise OpdError(
            f"{path} is not a list of rows",
            why="it holds neither a JSON list nor an object whose 'data' is one",
            fix='write [{...}, ...] or {"data": [{...}, ...]}',
        )
    items = cast("list[Any]", content)
    return [_Row(f"{path.name}[{index}]", _record(item)) for index, item in enumerate(items)]


def _decode(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OpdError(f"{path}:{line}: not UTF-8", why=str(error), fix="save the file as UTF-8") from error


def _read_csv(path: Path) -> list[_Row]:
    text = _decode(path)
    previous_limit = csv.field_size_limit(MAX_CSV_CELL_BYTES)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise OpdError(f"{path}:1: a column name comes twice", why=", ".join(header), fix="rename one of them")
        rows: list[_Row] = []
        start = reader.line_num + 1  # a quoted cell may span lines: the row is named by the line on which it begins
        for cells in reader:
            values = dict(zip(header, cells, strict=False))
            fits = len(cells) == len(header)
            bad = BadRowError("not as many cells as the header has columns")
            if cells:
                rows.append(_Row(f"{path.name}:{start}", values if fits else bad))
            start = reader.line_num + 1
        return rows
    except csv.Error as error:
        raise OpdError(f"{path}: broken csv", why=str(error), fix="quote cells that hold commas or quotes") from error
    finally:
        csv.field_size_limit(previous_limit)


def _read_parquet(path: Path) -> list[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        records = cast("list[dict[str, Any]]", pq.read_table(path).to_pylist())
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise OpdError(f"{path} is not a parquet file", why=str(error), fix="write it again") from error
    return [_Row(f"{path.name}:{index}", record) for index, record in enumerate(records)]


_READERS: dict[str, Callable[[Path], list[_Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


# ---- hub -----------------------------------------------------------------------------------------------------------


def _hub(source: HubSource) -> _Table:
    """A data set by hub id, kept in the hub's own cache; a local folder of the same layout, cached nowhere."""
    import datasets
    from datasets.exceptions import DatasetsError

    name = source.dataset if source.subset is None else f"{source.dataset}/{source.subset}"
    is_folder = Path(source.dataset).is_dir()
    if is_folder and source.revision is not None:
        raise OpdError(
            f"the data set {name!r} has no revision {source.revision!r}",
            why="it is a local folder, and revisions are the hub's",
            fix="remove revision",
        )

    def load(cache: str | None) -> datasets.Dataset:
        return datasets.load_dataset(
            source.dataset,
            source.subset,
            split=source.split,
            revision=source.revision,
            cache_dir=cache,
            # A folder's cache is deleted below, so nothing may stay mapped to it.
            keep_in_memory=cache is not None,
        )

    try:
        if is_folder:
            with tempfile.TemporaryDirectory(prefix="opd-data-") as cache:
                table = load(cache)
        else:
            table = load(None)
    except (OSError, ValueError, DatasetsError) as error:
        raise OpdError(
            f"the data set {name!r}, split {source.split!r}, cannot be loaded",
            why=f"{type(error).__name__}: {error}",
            fix="check dataset, subset, split and revision; without a network only local folders and data sets that "
            "were fetched before can be loaded",
        ) from error
    columns: Sequence[str] = table.column_names
    # A folder's rows are named without the path to it: ids, and the seeds made from them, are the same everywhere.
    short = name.removeprefix(str(Path(source.dataset).parent) + "/") if is_folder else name
    rows = (_Row(f"{short}:{source.split}:{index}", dict(record)) for index, record in enumerate(_records(table)))
    return f"{name}:{source.split}", list(columns), rows


def _records(table: Iterable[Any]) -> Iterable[dict[str, Any]]:
    return cast("Iterable[dict[str, Any]]", table)
