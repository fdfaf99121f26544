"""From files and overrides to a recipe that knows where each of its values came from.

A recipe is made of layers, later ones over earlier ones: the files it `extends:`, the file itself, then `key=value`
overrides. Mappings join key by key and lists replace lists; choosing another `name` in a union drops the keys of the
earlier choice. A relative `path:` of a data file is relative to the file that sets it, or to the working folder when an
override or a Python mapping does; everything else that names a folder (`folder`, `student.model`, `dataset`) is
relative to the working folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opd.config import strict_yaml
from opd.config.explain import faults_of
from opd.config.faults import Fault, raise_all
from opd.config.layers import finish, from_overrides, merge_all
from opd.config.resolved import leaves, resolved_yaml, write_resolved
from opd.config.schema import Recipe
from opd.config.shape import ROOT
from opd.config.suggest import nearest
from opd.config.tree import DEFAULT, OVERRIDE, Node, Origin, from_python
from opd.errors import OpdError

MAPPING = "recipe given in Python"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where it came from.

    Args:
        recipe: the validated recipe.
        provenance: dotted key -> the layer that set it: ``default``, a file such as ``recipes/demo.yaml``, or
            ``override``.
        layers: the layers, earliest first.
    """

    recipe: Recipe
    provenance: Mapping[str, str]
    layers: tuple[str, ...]

    def to_yaml(self) -> str:
        """The text of resolved.yaml: every value with its source."""
        return resolved_yaml(self.recipe, self.provenance)

    def write(self, path: Path) -> None:
        """Write resolved.yaml; loading it gives an equal recipe."""
        write_resolved(path, self.recipe, self.provenance)


def load_recipe(
    recipe: str | PathLike[str] | Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()
) -> LoadedRecipe:
    """Read, join and validate the layers of a recipe. Rules that span sections are `opd.config.check.check`'s.

    Args:
        recipe: a YAML file (in the working folder or among the recipes that come with `opd`, with or without `.yaml`),
            or the same as a Python mapping.
        overrides: `key.sub=value` texts; the value is YAML, `prompt.student.0.content=...` reaches into lists.

    Raises:
        OpdError: that names every mistake with its key, value, layer and what was expected.
    """
    faults: list[Fault] = []
    files: dict[Path, Node] = {}
    if isinstance(recipe, Recipe | Mapping):
        subject = MAPPING
        root = from_python(recipe, Origin(MAPPING, Path.cwd()), faults)
        layers = _with_bases(root, (), files)
    else:
        path = find_recipe(recipe, Path.cwd())
        subject = label(path)
        layers = _file_layers(path, (), files)
    if overrides:
        layers.append(from_overrides(overrides))
    tree = finish(merge_all(layers, faults), ROOT, faults)
    try:
        # JSON, because strict validation of Python values would refuse lists where the schema holds tuples.
        resolved = Recipe.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        faults += faults_of(error.errors(include_url=False), tree)
        raise_all(subject, faults)
        raise
    except OpdError as error:  # from a validator of the schema, which knows more to say than pydantic
        raise_all(subject, [*faults, Fault(error.what, error.why, error.fix)])
        raise
    raise_all(subject, faults)
    provenance = {dotted: _source(tree, dotted) for dotted in leaves(resolved)}
    return LoadedRecipe(resolved, provenance, tuple(layer.origin.layer for layer in layers))


def _source(tree: Node, dotted: str) -> str:
    node = tree.find(tuple(dotted.split(".")))
    return DEFAULT if node is None else node.origin.layer


def _file_layers(path: Path, chain: tuple[Path, ...], files: dict[Path, Node]) -> list[Node]:
    """The layers of a file, its bases first. A file that several layers extend counts once, where it first stands."""
    if path in chain:
        cycle = " -> ".join(label(one) for one in (*chain[chain.index(path) :], path))
        raise OpdError(f"{label(chain[-1])} extends itself", why=cycle, fix="remove one `extends:` of the circle")
    if path in files:
        return []
    root = strict_yaml.parse(_text(path), label(path), path.parent)
    if root.value is None:
        root = Node({}, root.origin)
    if not isinstance(root.value, dict):
        why = f"a recipe is a mapping of keys; this is a {'list' if isinstance(root.value, list) else 'plain value'}"
        raise OpdError(f"{label(path)} holds no recipe", why=why, fix="see recipes/demo.yaml for the form")
    files[path] = root
    return _with_bases(root, (*chain, path), files)


def _with_bases(root: Node, chain: tuple[Path, ...], files: dict[Path, Node]) -> list[Node]:
    """The layers that a layer `extends`, then the layer itself."""
    assert isinstance(root.value, dict)
    own = dict(root.value)
    extends = own.pop("extends", None)
    layers: list[Node] = []
    if extends is not None:
        names = extends.value if isinstance(extends.value, list) else [extends]
        for name in names:
            if not isinstance(name.value, str):
                why = f"`extends` is {name.plain()!r} in {name.origin}"
                raise OpdError(
                    "`extends` needs file names", why=why, fix="write extends: base.yaml, or a list of files"
                )
            layers += _file_layers(find_recipe(name.value, name.origin.folder), chain, files)
    return [*layers, Node(own, Origin(root.origin.layer, root.origin.folder))]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise OpdError(f"cannot read {label(path)}", why=why, fix="check the file and its permissions") from error
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
        raise OpdError(f"cannot read {label(path)}", why=why, fix="save the file as UTF-8") from error


# ---- where recipes are ----------------------------------------------------------------------------------------------


def recipe_folder() -> Path | None:
    """The recipes that come with `opd`: inside the installed package, or beside `src` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    candidates = [package / "recipes"]
    if package.parent.name == "src":
        candidates.append(package.parent.parent / "recipes")
    return next((folder for folder in candidates if folder.is_dir()), None)


def find_recipe(name: str | PathLike[str], folder: Path) -> Path:
    """The absolute path of a recipe file.

    Args:
        name: a path relative to `folder`, else a packaged recipe: `demo`, `demo.yaml`, `recipes/demo.yaml`.
        folder: where to look first.

    Raises:
        OpdError: that lists the recipes that exist.
    """
    path = Path(name)
    packaged = recipe_folder()
    places = [folder / path]
    if packaged is not None and not path.is_absolute():
        parts = path.parts[1:] if path.parts[:1] == ("recipes",) else path.parts
        places.append(packaged.joinpath(*parts))
    for place in places:
        for candidate in (place, place.with_name(f"{place.name}.yaml")) if path.name else ():
            if _is_file(candidate):
                return candidate.resolve()
    here = _recipes_in(places[0].parent)
    known = _recipes_in(packaged) if packaged is not None else []
    stems = {Path(one).stem: one for one in [*known, *here]}
    meant = stems.get(nearest(path.stem, stems) or "")
    why = f"{places[0].parent} holds {', '.join(here) or 'no .yaml file'}"
    raise OpdError(
        f"there is no recipe {str(name)!r}",
        why=f"{why}; packaged recipes: {', '.join(known) or 'none'}",
        fix=f"did you mean {meant!r}?" if meant else "name a recipe file, or one of the packaged recipes",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _recipes_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.glob("*.yaml")) if folder.is_dir() else []
    except OSError:
        return []


def label(path: Path) -> str:
    """A file's name in errors and provenance: relative to the working folder or to the packaged recipes if inside."""
    packaged = recipe_folder()
    for root in (Path.cwd(), packaged.parent if packaged is not None else None):
        if root is not None and path.is_relative_to(root):
            return str(path.relative_to(root))
    return str(path)


__all__ = ["OVERRIDE", "LoadedRecipe", "find_recipe", "load_recipe", "recipe_folder"]
