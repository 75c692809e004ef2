"""What all tests share: markers whose tests skip visibly where the machine lacks something."""

import shutil

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, rather than skip, tests that need a GPU"
    )
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="fail, rather than skip, tests that need Chromium",
    )


def _no_gpu() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch isn't installed"
    return None if torch.cuda.is_available() else "torch finds no GPU"


def _no_browser() -> str | None:
    if not any(map(shutil.which, CHROMIUM)):
        return "no Chromium on PATH (apt-get install chromium chromium-driver)"
    return None if shutil.which("chromedriver") else "no chromedriver on PATH"


def pytest_collection_modifyitems(config, items):
    for marker, need, option, why in (
        ("gpu", "needs a GPU", "--require-gpu", _no_gpu()),
        ("browser", "needs a browser", "--require-browser", _no_browser()),
    ):
        if why is None:
            continue
        for item in items:
            if item.get_closest_marker(marker) is None:
                continue
            if config.getoption(option):
                item.obj = lambda *_, text=f"{need}: {why}", **__: pytest.fail(text)
            else:
                item.add_marker(pytest.mark.skip(reason=f"{need}: {why}"))
