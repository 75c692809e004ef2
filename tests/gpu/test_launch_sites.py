"""Every kernel starts on the device of its tensors: read off the source, for want of two cards."""

import ast
import contextlib
from pathlib import Path

import pytest
from helpers import ROOT

torch = pytest.importorskip("torch")

from wavealign._devices import on_device  # noqa: E402

SOURCES = sorted((ROOT / "wavealign").rglob("*.py"))

# What torch answers for the current device, unless it is told which.
OF_A_DEVICE = {"current_stream", "get_device_capability", "get_device_properties", "synchronize"}
# These are about the current device: what measures on it, and what is asked inside of `on_device`.
CURRENT = {
    ("gpu/row_table.py", "is_hopper"),
    ("attention/backends.py", "rows_in_flight"),
}


def decorated(tree):
    """Names of the functions that triton or gluon compile."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(d).split("(")[0].split(".") for d in node.decorator_list)
    }


def wrongs(source, kernels, name="x.py"):
    """Lines that start something on whichever device is the current one."""
    found = []

    def visit(node, guarded, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            # A function that is made inside of the guard runs after it.
            guarded, function = False, getattr(node, "name", function)
        if isinstance(node, ast.With):
            guarded |= any(
                isinstance(item.context_expr, ast.Call)
                and ast.unparse(item.context_expr.func) == "on_device"
                for item in node.items
            )
        if isinstance(node, ast.Call) and not guarded and (name, function) not in CURRENT:
            callee = node.func
            bare = not node.args and not node.keywords
            if isinstance(callee, ast.Subscript):
                launches = ast.unparse(callee.value).split(".")[-1] in kernels
            elif isinstance(callee, ast.Attribute):
                launches = bare and (
                    callee.attr in ("launch", "record")
                    or (callee.attr in OF_A_DEVICE and ast.unparse(callee.value) == "torch.cuda")
                )
            else:
                launches = False
            if launches:
                found.append(f"{name}:{node.lineno}: {ast.unparse(callee)}")
        for child in ast.iter_child_nodes(node):
            visit(child, guarded, function)

    visit(ast.parse(source), False, None)
    return found


def test_every_launch_is_on_the_device_of_its_tensors():
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    kernels = set().union(*map(decorated, trees.values()))
    assert {"attend_rows", "_attend_rows", "_move", "ordered_lists", "rank_rows", "look"} <= kernels
    found = []
    for path in SOURCES:
        name = Path(path).relative_to(ROOT / "wavealign").as_posix()
        if name not in ("gpu/rig.py", "gpu/doctor.py"):  # they are about the current GPU
            found += wrongs(path.read_text(), kernels, name)
    assert not found, "outside of `with on_device(...)`: " + ", ".join(found)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("kernel[(1,)](x)", 1),
        ("kernels.kernel[(1,)](x)", 1),
        ("with on_device(x):\n    kernel[(1,)](x)", 0),
        ("with other(x):\n    kernel[(1,)](x)", 1),
        ("with on_device(x):\n    kernel[(1,)](x)\nkernel[(1,)](x)", 1),
        ("with on_device(x):\n    def later():\n        kernel[(1,)](x)", 1),
        ("with on_device(x):\n    later = lambda: kernel[(1,)](x)", 1),
        ("table[name](x)", 0),
        ("bound.launch()", 1),
        ("with on_device(x):\n    bound.launch()", 0),
        ("event.record()", 1),
        ("event.record(stream)", 0),
        ("torch.cuda.current_stream()", 1),
        ("torch.cuda.current_stream(x.device)", 0),
    ],
)
def test_a_launch_on_the_current_device_is_found(source, wrong):
    assert len(wrongs(source, {"kernel"})) == wrong


def test_the_device_is_changed_only_where_it_is_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    entered = []

    def enter(device):
        entered.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    for place in ("cpu", "cuda", "cuda:1", "cuda:0"):
        with on_device(torch.device(place)):
            pass
    with on_device(torch.ones(1)):
        pass
    assert entered == [torch.device("cuda:0")]
