"""Docstrings of public names: an example of each that `wavealign` exports, `Args`, `Raises`."""

import ast
import doctest
import inspect
import re

import pytest
from helpers import ROOT

import wavealign

PACKAGE = ROOT / "wavealign"
EXPORTED = [name for name in wavealign.__all__ if name != "__version__"]
MOST_UNEXPLAINED = 2  # parameters of a function that needs no `Args`
HOUSE_ERRORS = {"InputError", "MissingCapabilityError", "WaveAlignError", "WriteError"}
MAKE_ERRORS = {"unknown_name", "error"}  # raise unknown_name(...), raise file.error(...)


@pytest.mark.parametrize("name", EXPORTED)
def test_the_example_of_an_exported_name_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name in wavealign._HOMES["wavealign.attention"]:
        pytest.importorskip("torch")
    text = inspect.getdoc(getattr(wavealign, name))
    examples = section(text, "Example")
    assert text.endswith(examples.rstrip()), "`Example:` comes last"
    found = doctest.DocTestParser().get_doctest(examples, {}, f"wavealign.{name}", None, None)
    assert found.examples, "no example"
    if "import torch" in examples:
        pytest.importorskip("torch")
    printed = []
    doctest.DocTestRunner().run(found, out=printed.append)
    assert not printed, "".join(printed)


def public_functions():
    """(where, function, docstrings that may explain it) of public modules, classes included."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if re.search(r"(^|/)_(?!_init__)", name):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and is_public(node):
                yield f"{name}:{node.lineno} {node.name}", node, [ast.get_docstring(node) or ""]
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and is_public(method):
                    texts = [ast.get_docstring(method) or ""]
                    if method.name in ("__init__", "__post_init__"):
                        texts.append(ast.get_docstring(node) or "")
                    yield f"{name}:{method.lineno} {node.name}.{method.name}", method, texts


def is_public(function):
    """Neither hidden nor a command of click, an overload or an override that is told of above."""
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    if any(re.search(r"\bcommand\(|\bgroup\(|^overload$|^override$", d) for d in decorators):
        return False
    return not function.name.startswith("_") or function.name in (
        "__init__",
        "__post_init__",
        "__call__",
    )


def parameters(function):
    """Names of what a caller gives."""
    a = function.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    names = [argument.arg for argument in given]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def section(text, title):
    """The lines below a title of a docstring."""
    found = re.search(rf"^{title}:\n((?: .*\n|\n)*)", text + "\n", re.MULTILINE)
    return found.group(1) if found else ""


def explained(text):
    """Parameters that a docstring's entries name; a line may name several."""
    entries = section(text, "Args") + "\n" + section(text, "Attributes")
    heads = re.findall(r"^ {4}(\S.*?):(?: |$)", entries, re.MULTILINE)
    return {name.strip("* ") for head in heads for name in head.split(",")}


def raises_house_errors(function):
    """Whether its own body raises one, functions inside left out."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            words = set(re.findall(r"\w+", ast.unparse(called)))
            if words & (HOUSE_ERRORS | MAKE_ERRORS):
                return True
        waiting += ast.iter_child_nodes(node)
    return False


def test_three_or_more_parameters_are_each_explained():
    missing = []
    for where, function, texts in public_functions():
        names = parameters(function)
        if re.match(r"See `", texts[0]):
            continue  # an override: its entries stand above
        left = set(names) - set.union(*map(explained, texts))
        if len(names) > MOST_UNEXPLAINED and left:
            missing.append(f"{where}: {', '.join(n for n in names if n in left)}")
    assert not missing, "\n".join(["no entry below `Args:` for", *missing])


def test_errors_that_a_function_raises_are_told():
    missing = [
        where
        for where, function, texts in public_functions()
        if raises_house_errors(function) and not any(section(text, "Raises") for text in texts)
    ]
    assert not missing, "\n".join(["no `Raises:` in", *missing])
