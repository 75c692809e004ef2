"""What all tests share: the `gpu` marker, which skips visibly where there is no GPU."""

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, rather than skip, tests that need a GPU"
    )


def _no_gpu() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch isn't installed"
    return None if torch.cuda.is_available() else "torch finds no GPU"


def pytest_collection_modifyitems(config, items):
    why = _no_gpu()
    if why is None:
        return
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if config.getoption("--require-gpu"):
            item.obj = lambda *_, **__: pytest.fail(f"needs a GPU: {why}")
        else:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {why}"))
