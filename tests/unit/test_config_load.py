"""Layers, overrides, provenance and the errors of recipes."""

from __future__ import annotations

import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opd.config import LoadedRecipe, Recipe, load_recipe
from opd.config.base import Config
from opd.config.json_schema import recipe_schema
from opd.config.load import recipe_folder
from opd.config.shape import ROOT, Slot, all_keys
from opd.config.strict_yaml import parse
from opd.config.suggest import ELSEWHERE
from opd.config.tree import DEFAULT
from opd.errors import OpdError

SMALL = """\
name: small
student:
  model: some/model
data:
  train: {name: task, task: products}
train:
  num_steps: 10
  num_problems_per_step: 4
  learning_rate: 1e-3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def small() -> dict[str, Any]:
    return yaml.safe_load(SMALL.replace("1e-3", "0.001"))


def error_of(recipe: Any, *overrides: str) -> OpdError:
    with pytest.raises(OpdError) as caught:
        load_recipe(recipe, overrides)
    return caught.value


# ---- layers ---------------------------------------------------------------------------------------------------------


def test_later_layers_win_and_provenance_says_which(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep/mid.yaml").write_text("extends: ../small.yaml\ntrain: {num_steps: 20, learning_rate: 0.5}\n")
    (folder / "top.yaml").write_text("extends: deep/mid.yaml\ntrain:\n  learning_rate: 0.25\n")
    loaded = load_recipe("top.yaml", ["train.weight_decay=0.1"])
    train = loaded.recipe.train
    assert (train.num_problems_per_step, train.num_steps, train.learning_rate, train.weight_decay) == (4, 20, 0.25, 0.1)
    assert loaded.layers == ("small.yaml", "deep/mid.yaml", "top.yaml", "override")
    assert {key: loaded.provenance[f"train.{key}"] for key in ("num_problems_per_step", "num_steps", "eps")} == {
        "num_problems_per_step": "small.yaml",
        "num_steps": "deep/mid.yaml",
        "eps": "default",
    }
    assert loaded.provenance["train.learning_rate"] == "top.yaml"
    assert loaded.provenance["train.weight_decay"] == "override"


def test_a_base_that_two_layers_share_does_not_undo_the_first(folder: Path) -> None:
    (folder / "a.yaml").write_text("extends: small.yaml\nseed: 1\nname: a\n")
    (folder / "b.yaml").write_text("extends: small.yaml\nseed: 2\n")
    (folder / "top.yaml").write_text("extends: [a.yaml, b.yaml]\n")
    recipe = load_recipe("top.yaml").recipe
    assert (recipe.name, recipe.seed) == ("a", 2)


def test_a_circle_of_extends_is_named(folder: Path) -> None:
    (folder / "a.yaml").write_text("extends: b.yaml\n")
    (folder / "b.yaml").write_text("extends: a.yaml\n")
    assert error_of("a.yaml").why == "a.yaml -> b.yaml -> a.yaml"


def test_a_missing_base_is_an_error_that_names_its_neighbour(folder: Path) -> None:
    (folder / "a.yaml").write_text("extends: smal.yaml\n")
    assert "small.yaml" in error_of("a.yaml").fix


def test_another_choice_of_name_drops_the_keys_of_the_earlier(folder: Path) -> None:
    (folder / "jsd.yaml").write_text("extends: small.yaml\nloss: {name: jsd, teacher_weight: 0.3, temperature: 2}\n")
    same = load_recipe("jsd.yaml", ["loss.temperature=3"]).recipe.loss
    assert same.model_dump(include={"name", "teacher_weight", "temperature"}) == {
        "name": "jsd",
        "teacher_weight": 0.3,
        "temperature": 3.0,
    }
    other = load_recipe("jsd.yaml", ["loss.scale_by_temperature_squared=true", "loss.name=reverse_kl"]).recipe.loss
    assert (other.name, other.temperature) == ("reverse_kl", 1.0)
    assert other.scale_by_temperature_squared is True  # type: ignore[union-attr]


def test_an_unnamed_choice_is_the_default_one(folder: Path) -> None:
    assert load_recipe("small.yaml", ["loss.temperature=2"]).recipe.loss.name == "forward_kl"
    (folder / "t.yaml").write_text("extends: small.yaml\nloss: {temperature: 2}\n")
    loss = load_recipe("t.yaml", ["loss.name=reverse_kl"]).recipe.loss
    assert (loss.name, loss.temperature) == ("reverse_kl", 1.0)


def test_a_name_that_is_no_union_keeps_its_siblings(folder: Path) -> None:
    (folder / "t.yaml").write_text("extends: small.yaml\ncontext: {name: placebo, num_demonstrations: 3}\n")
    assert load_recipe("t.yaml", ["context.name=demonstrations"]).recipe.context.num_demonstrations == 3


def test_lists_replace_lists_and_overrides_reach_into_them(folder: Path) -> None:
    messages = "prompt: {student: [{role: system, content: a}, {role: user, content: b}]}\nlog: {trackers: [wandb]}\n"
    (folder / "t.yaml").write_text("extends: small.yaml\n" + messages)
    loaded = load_recipe("t.yaml", ["prompt.student.1.content=What is {{ problem }}?", "log.trackers=[trackio]"])
    assert [(m.role, m.content) for m in loaded.recipe.prompt.student or ()] == [
        ("system", "a"),
        ("user", "What is {{ problem }}?"),
    ]
    assert loaded.provenance["prompt.student.0.content"] == "t.yaml"
    assert loaded.provenance["prompt.student.1.content"] == "override"
    assert loaded.recipe.log.trackers == ("trackio",)
    error = error_of("t.yaml", "prompt.student.2.content=c")
    assert "it has 2 items" in error.why


def test_paths_of_data_files_are_relative_to_the_layer_that_sets_them(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep/t.yaml").write_text("extends: ../small.yaml\ndata: {train: {name: file, path: rows.jsonl}}\n")
    recipe = load_recipe("deep/t.yaml").recipe
    assert recipe.data.train.path == folder / "deep/rows.jsonl"  # type: ignore[union-attr]
    recipe = load_recipe("deep/t.yaml", ["data.train.path=rows.jsonl"]).recipe
    assert recipe.data.train.path == folder / "rows.jsonl"  # type: ignore[union-attr]


def test_packaged_recipes_are_found_from_anywhere_but_the_working_folder_comes_first(folder: Path) -> None:
    names = ["demo", "demo.yaml", "recipes/demo.yaml"]
    loaded = [load_recipe(name) for name in names]
    assert {one.recipe.name for one in loaded} == {"demo"}
    assert {one.layers for one in loaded} == {("recipes/demo.yaml",)}
    (folder / "demo.yaml").write_text(SMALL)
    assert load_recipe("demo.yaml").recipe.name == "small"
    packaged = recipe_folder()
    assert packaged is not None
    error = error_of("dmo.yaml")
    assert "demo.yaml" in error.fix
    assert all(file.name in error.why for file in packaged.glob("*.yaml"))


# ---- overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed"], "there is no `=`"),
        (["seed="], "there is no value"),
        ([".seed=1"], "a part of the key is empty"),
        (["train..num_steps=1"], "a part of the key is empty"),
        (["seed=1", "seed=2"], "the key is set twice"),
        (["train.num_steps=1", "train={num_steps: 2}"], "`train.num_steps` is set by another override"),
        (["name=[1"], "while parsing a flow sequence"),
        (["name=a # b"], "'# b' would be lost"),
        (["name={{ problem }}"], "a key is a mapping or a list"),
    ],
)
def test_bad_overrides_are_named(folder: Path, overrides: list[str], expected: str) -> None:
    error = error_of("small.yaml", *overrides)
    assert expected in error.why
    assert overrides[-1] in error.what


def test_all_bad_overrides_are_named_at_once(folder: Path) -> None:
    error = error_of("small.yaml", "seed", "name=", "train.num_steps=1", "train.num_steps=2")
    assert error.what == "overrides has 3 errors"


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=3), st.booleans())
def test_the_last_layer_that_sets_a_value_wins(seeds: list[int], overridden: bool) -> None:
    recipe = {**small(), "seed": seeds[0]}
    loaded = load_recipe(recipe, [f"seed={seeds[-1]}"] if overridden else ())
    assert loaded.recipe.seed == (seeds[-1] if overridden else seeds[0])
    assert loaded.provenance["seed"] == ("override" if overridden else "recipe given in Python")


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_every_error_comes_at_once_with_layer_value_and_what_was_expected(folder: Path) -> None:
    text = SMALL.replace("num_steps: 10", "num_steps: 12abc").replace("learning_rate", "learing_rate")
    (folder / "bad.yaml").write_text(text + "  weight_decay: true\nstuff: 1\n")
    error = error_of("bad.yaml", "loss.name=jds", "student.dtype=bf16", "train.betas=[.9, x]")
    assert error.what == "bad.yaml has 8 errors"
    for expected in (
        "`train.num_steps` is '12abc': expected a whole number; set in bad.yaml, line 7",
        "unknown key `train.learing_rate`: `train` has no key `learing_rate`; set in bad.yaml, line 9",
        "`train.learning_rate` is missing",
        "`train.weight_decay` is true: expected a number; set in bad.yaml, line 10",
        "unknown key `stuff`",
        "`loss.name` is 'jds': expected one of forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl, adaptive_kl, "
        "entropy_aware, tvd, sampled_reverse_kl, sft, mix; set in override",
        "`student.dtype` is 'bf16': expected one of 'float32' or 'bfloat16'; set in override",
        "`train.betas.1` is 'x': expected a number",
    ):
        assert expected in error.why
    for expected in ("`train.learning_rate`?", "did you mean loss.name=jsd?", "did you mean student.dtype=bfloat16?"):
        assert expected in error.fix


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.num_steps=true", None),
        ("train.num_steps=1.5", None),
        ("train.num_steps='3'", None),
        ("train.learning_rate=true", None),
        ("train.learning_rate='0.1'", None),
        ("train.learning_rate=.nan", None),
        ("train.learning_rate=.inf", None),
        ("train.learning_rate=1e999", None),
        ("student.gradient_checkpointing=1", None),
        ("student.gradient_checkpointing=yes", None),
        ("student.revision=1234567", None),
        ("name=Answer: 3", None),
        ("student.adapter.target_modules=[a, 3]", None),
        ("train.learning_rate=1", 1.0),
        ("train.learning_rate=1e-5", 1e-5),
        ("train.num_steps=1_000", 1000),
        ("train.num_steps=010", 10),
        ("student.revision='1234567'", "1234567"),
        ("data.train.options={a: 1, b: 1.0, c: true, d: x}", {"a": 1, "b": 1.0, "c": True, "d": "x"}),
    ],
)
def test_scalars_are_strict(folder: Path, override: str, value: object) -> None:
    key = override.partition("=")[0]
    if value is None:
        assert key in error_of("small.yaml", override).what
        return
    found: Any = load_recipe("small.yaml", [override]).recipe
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    if isinstance(value, dict):
        assert {name: type(one) for name, one in found.items()} == {name: type(one) for name, one in value.items()}
    else:
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("train.learning_rte=1", "`train.learning_rate`"),
        ("train.learningRate=1", "`train.learning_rate`"),
        ("learning_rate=1", "`train.learning_rate`"),
        ("train.lr=1", "`train.learning_rate`"),
        ("beta=0.5", "`loss.teacher_weight`"),
        ("rollout.max_completion_length=5", "`rollout.max_new_tokens`"),
        ("loss.teacher_weight=0.5", "loss.name=jsd"),
        ("loss.clip.max=0.5", "loss.clip.name=per_token"),
        ("teacher.model=x", "teacher.name=model"),
        ("student.adapter={name: full, r: 3}", "student.adapter.name=lora"),
    ],
)
def test_unknown_keys_name_their_neighbour(folder: Path, override: str, fix: str) -> None:
    error = error_of("small.yaml", override)
    assert fix in error.fix
    assert "override" in error.why


@given(st.data())
def test_a_key_with_one_letter_too_few_names_the_key(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([key for key in all_keys() if key.count(".") == 1 and key.startswith("train.")]))
    parent, _, last = key.rpartition(".")
    position = data.draw(st.integers(0, len(last) - 1))
    typo = last[:position] + last[position + 1 :]
    error = error_of({**small()}, f"{parent}.{typo}=1")
    if f"{parent}.{typo}" not in set(all_keys()):
        assert f"unknown key `{parent}.{typo}`" in str(error)
        assert f"`{key}`" in error.fix


def test_names_of_other_trainers_lead_to_keys_that_exist() -> None:
    keys = set(all_keys())
    assert set(ELSEWHERE.values()) <= keys
    assert not {name for name in ELSEWHERE if name in keys}


def test_python_values_that_yaml_has_no_form_for_are_refused() -> None:
    error = error_of({**small(), "name": {1: 2}, "seed": object()})
    assert "keys are text, not int" in error.why
    assert "object" in error.why


# ---- YAML -----------------------------------------------------------------------------------------------------------


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + earlier] * 10)}]\n" for earlier, name in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "the key `a` is already set in line 1"),
        ("a: 1\nb: {c: 1, c: 2}\n", 2, "already set"),
        ("a: 1\nb: \0\n", 2, "not allowed in YAML"),
        ('a: "\\0"\n', 1, "NUL"),
        ('a: 1\nb: "\\ud800"\n', 2, "surrogate"),
        ("a: [1\nb: 2", 2, "flow sequence"),
        ("a: !!python/object:os.system x\n", 1, "tag"),
        ("a: !!timestamp 2020-01-01\n", 1, "tag"),
        ("a: &x 1\nb:\n  <<: *x\n", 3, "merge keys"),
        ("a: &x [*x]\n", 1, "an alias holds itself"),
        ("a: *x\n", 1, "undefined alias"),
        ("train.num_steps: 3\n", 1, "a key holds no dot"),
        ("a: 1\n---\nb: 1\n", 2, "expected a single document"),
        ("1: a\n", 1, "keys are text"),
        (f"a: {'9' * 5000}\n", 1, "too many digits"),
        ("a: " + "[" * 1000, 1, "nested too deeply"),
        (BOMB, 1, "aliases expand"),
    ],
)
def test_yaml_faults_name_file_and_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(text.encode())
    error = error_of(file)
    assert why in error.why
    assert f"line {line}" in error.what
    assert "r.yaml" in error.what


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("0x10", "0x10"),
        ("1_000", 1000),
        ("'1'", "1"),
        ("-.inf", -math.inf),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: object) -> None:
    found = parse(text, "t", Path()).plain()
    assert found == value
    assert type(found) is type(value)


def test_unreadable_files_are_errors(folder: Path) -> None:
    (folder / "latin.yaml").write_bytes(b"name: \xff\n")
    assert "not UTF-8" in error_of("latin.yaml").why
    (folder / "list.yaml").write_text("- 1\n")
    assert "mapping" in error_of("list.yaml").why
    assert "no recipe" in error_of(folder).what
    assert "no recipe" in error_of("a\0b").what
    assert "no recipe" in error_of("").what
    assert "no recipe" in error_of("x" * 300).what
    assert "no recipe" in error_of("x" * 300 + "/small.yaml").what
    (folder / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert load_recipe("bom.yaml").recipe.name == "small"


YAML_PIECES = st.one_of(
    st.sampled_from(list("\n{}[]'\"|>%~\t\\#\0\ufeff\x85é")),
    st.sampled_from([": ", ":\n  ", "- ", "? ", "&a ", "*a", "!!int ", "1e5", ".nan", "null", "<<", "extends"]),
    st.sampled_from(list(Recipe.model_fields)),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(max_size=80), st.lists(YAML_PIECES, max_size=25).map("".join), st.binary(max_size=60)))
def test_no_text_raises_anything_but_opd_error(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    with pytest.raises(OpdError):
        load_recipe(file)


@settings(max_examples=200)
@given(st.sampled_from(["seed", "name", "student", "loss.clip", "prompt.student", "data.train.options"]), st.text())
def test_no_override_raises_anything_but_opd_error(key: str, value: str) -> None:
    try:
        loaded = load_recipe(small(), [f"{key}={value}"])
    except OpdError:
        return
    assert isinstance(loaded, LoadedRecipe)


# ---- resolved.yaml --------------------------------------------------------------------------------------------------


TEXT = st.one_of(
    st.sampled_from(
        ["yes", "no", "null", "1e-5", "010", "a: b", "- x", "# c", "{{ x }}", "~", "0x1", "1:30", "=", "<<", ""]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12),
)


def values(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Any value that a field of the schema may hold, as Python values that a recipe may be given as."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values(args[0], tuple(args[1:]))
    if origin in (Union, UnionType):
        return st.one_of([values(one, metadata) for one in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), min_size=1, max_size=2)
    if origin is tuple:
        return st.tuples(*map(values, args)).map(list)
    if origin is dict:
        return st.dictionaries(TEXT.filter(lambda key: key and "." not in key), values(args[1]), max_size=2)
    if annotation is NoneType:
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation in (int, float):
        return numbers(annotation, metadata)
    if annotation is Path:
        return TEXT.filter(lambda text: text and not text.startswith("~"))
    if annotation is str:
        return TEXT.filter(bool)
    assert issubclass(annotation, Config), annotation
    fields = {name: values(field.annotation, tuple(field.metadata)) for name, field in annotation.model_fields.items()}
    named = {name for name, field in annotation.model_fields.items() if field.is_required() or name == "name"}
    return st.fixed_dictionaries(
        {name: one for name, one in fields.items() if name in named},
        optional={name: one for name, one in fields.items() if name not in named},
    )


def numbers(kind: type, metadata: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    bounds = {name: getattr(one, name) for one in metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if kind is int:
        return st.integers(low, high)
    return st.floats(
        low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds, allow_nan=False, allow_infinity=False
    )


def test_a_quoted_merge_key_is_a_key_and_loads_back(tmp_path: Path) -> None:
    mapping = {
        "name": "r",
        "student": {"model": "m"},
        "data": {"train": {"name": "task", "task": "products", "options": {"<<": False}}},
        "train": {"num_steps": 1, "num_problems_per_step": 1, "learning_rate": 1.0},
    }
    loaded = load_recipe(mapping)
    loaded.write(tmp_path / "resolved.yaml")
    assert load_recipe(tmp_path / "resolved.yaml").recipe == loaded.recipe


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(values(Recipe))
def test_resolved_yaml_loads_back_to_an_equal_recipe(tmp_path: Path, mapping: dict[str, Any]) -> None:
    loaded = load_recipe(mapping)
    file = tmp_path / "resolved.yaml"
    loaded.write(file)
    again = load_recipe(file)
    assert again.recipe == loaded.recipe
    assert repr(again.recipe) == repr(loaded.recipe)  # types as well: 1 == 1.0 == True
    assert set(again.provenance.values()) == {str(file)}


def test_resolved_yaml_gives_every_value_its_source(folder: Path) -> None:
    text = load_recipe("small.yaml", ["train.eps=1e-6", "name='no'"]).to_yaml()
    lines = text.splitlines()
    assert 'name: "no"  # override' in lines
    assert "  eps: 1.0e-06  # override" in lines
    assert "  num_steps: 10  # small.yaml" in lines
    assert "  betas: [0.9, 0.999]  # default" in lines
    # Every line either opens a mapping or a list, or names its source.
    assert all(line.endswith((":", "default", "override", "small.yaml")) for line in lines[1:])
    # A plain YAML 1.1 reader gets the same numbers.
    assert yaml.safe_load(text)["train"]["eps"] == 1e-6


def test_provenance_covers_every_value(folder: Path) -> None:
    loaded = load_recipe("small.yaml")
    set_here = {key for key, layer in loaded.provenance.items() if layer != DEFAULT}
    assert set_here == {
        "name",
        "student.model",
        "data.train.name",
        "data.train.task",
        "train.num_steps",
        "train.num_problems_per_step",
        "train.learning_rate",
    }


def test_a_recipe_object_loads_to_itself(folder: Path) -> None:
    recipe = load_recipe("small.yaml").recipe
    assert load_recipe(recipe).recipe == recipe


# ---- schema ---------------------------------------------------------------------------------------------------------


def union_defaults(slot: Slot = ROOT) -> list[tuple[str, Slot]]:
    found = [(str(slot.annotation), slot)] if slot.is_union and slot.default is not None else []
    for config in slot.configs:
        for key in config.model_fields:
            found += union_defaults(slot.key(config, key))
    return found


def test_default_choices_are_what_their_name_alone_gives() -> None:
    # What fills in a missing `name` relies on it.
    slots = union_defaults()
    assert len(slots) >= 5
    for _, slot in slots:
        default = slot.default
        assert isinstance(default, Config)
        assert default == type(default).model_validate({"name": slot.name_in({})})


def test_json_schema_knows_every_key_and_requires_none() -> None:
    schema = recipe_schema()
    assert set(schema["properties"]) == {"extends", *Recipe.model_fields}
    train = schema["$defs"]["TrainConfig"]
    assert train["properties"]["num_steps"]["minimum"] == 1
    assert train["additionalProperties"] is False
    assert "'required'" not in str(schema)
    assert "oneOf" not in str(schema)
    assert {one["$ref"] for one in schema["properties"]["loss"]["anyOf"]} >= {"#/$defs/JSDConfig"}
