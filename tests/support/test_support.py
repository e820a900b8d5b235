"""The support matrix in docs/support.md is what these tests, and those of pipelines and several ranks, find."""

from __future__ import annotations

import pytest

from tests.support.matrix import FEATURES, REENTRANT, refusal, try_out
from tests.support.page import DATA, PAGE, STALE, VERSION, WRITING, read, rendered
from tests.support.rows import ROWS

compared = pytest.mark.skipif(WRITING, reason="written when the run ends")


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_a_feature_does_what_the_matrix_says(support, one_rank, engine, name):
    """Rule 1: the values of the plain call and the stated number of runs, or an error."""
    support(name, engine.name, try_out(FEATURES[name], engine))


@compared
def test_every_row_was_run_on_every_engine():
    """Rule 1: no row without cells, no cells without a row."""
    committed = read().get(VERSION)
    if committed is None:
        pytest.skip(f"docs/support has no file for torch {VERSION}: `make support` writes one")
    assert list(committed["features"]) == list(ROWS), STALE
    assert all(list(cells) == list(REENTRANT) for cells in committed["features"].values()), STALE


@compared
def test_the_page_is_what_was_found():
    """Rule 1: rendered from the files of all versions."""
    assert PAGE.read_text(encoding="utf-8") == rendered(ROWS, read()), STALE


@compared
def test_every_file_is_of_the_version_it_is_named_after():
    """Rule 1: the exact version is in it."""
    for version, found in read().items():
        assert found["torch"].startswith(f"{version}."), DATA
        assert found["python"]


def fails(error):
    try:
        raise error
    except Exception as raised:
        return raised


@pytest.mark.parametrize("error", [AttributeError("a slip"), ValueError("of the program"), KeyError("k")], ids=repr)
def test_a_slip_of_a_program_is_no_refusal(error):
    """Rule 1: only what regrow raises, and what torch does, is a cell."""
    with pytest.raises(type(error)):
        refusal(fails(error))
