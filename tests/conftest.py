"""Tests that need a CUDA device say so in a sentence where there is none."""

import pytest
import torch

WITHOUT_GPU = "needs a CUDA device, and torch sees none here; leave such tests out with -m 'not gpu'"


def unable(item) -> bool:
    return item.get_closest_marker("gpu") is not None and not torch.cuda.is_available()


@pytest.hookimpl(trylast=True)  # behind what -m and -k take away
def pytest_collection_modifyitems(config, items):
    alone = not hasattr(config, "workerinput")  # pytest-xdist's workers may only fail test by test
    if items and all(map(unable, items)) and alone and not config.option.collectonly:
        raise pytest.UsageError(f"each of the {len(items)} tests chosen {WITHOUT_GPU}")


def pytest_runtest_setup(item):
    if unable(item):
        pytest.fail(WITHOUT_GPU, pytrace=False)
