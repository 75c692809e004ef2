"""What all tests share: markers whose tests skip visibly where the machine lacks something."""

import shutil
from functools import cache

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


@cache
def _no_gpu() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch isn't installed"
    return None if torch.cuda.is_available() else "torch finds no GPU"


@cache
def _no_browser() -> str | None:
    if not any(map(shutil.which, CHROMIUM)):
        return "no Chromium on PATH (apt-get install chromium chromium-driver)"
    return None if shutil.which("chromedriver") else "no chromedriver on PATH"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for marker, need, find in (
        ("gpu", "needs a GPU", _no_gpu),
        ("browser", "needs a browser", _no_browser),
    ):
        if item.get_closest_marker(marker) is None or (why := find()) is None:
            continue
        if item.config.getoption(f"--require-{marker}"):
            pytest.fail(f"{need}: {why}", pytrace=False)
        pytest.skip(f"{need}: {why}")
