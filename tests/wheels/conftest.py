"""The wheel for this machine, built once."""

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="session")
def wheel(folder):
    import build_wheels

    return build_wheels.build(folder, "x86_64")
