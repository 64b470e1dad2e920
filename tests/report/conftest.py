"""A browser for the tests of the page, where there is one."""

from collections.abc import Iterator

import pytest

from tests.report.chromium import BINARY, Chromium


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if BINARY is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
