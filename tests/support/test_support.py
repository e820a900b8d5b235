"""The support matrix in docs/support.md is what these tests, and those of pipelines and several ranks, find."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.support.matrix import FEATURES, REENTRANT, Feature, try_out
from tests.support.page import DATA, PAGE, STALE, VERSION, WRITING, read, rendered
from tests.support.rows import ROWS

compared = pytest.mark.skipif(WRITING, reason="written when the run ends")


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
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


def test_versions_that_differ_are_both_shown():
    """Rule 1: a cell that holds on one version is not said to hold on the other."""
    works, refused = {"is": "works", "replays": 1}, {"is": "refused", "by": "torch", "says": "RuntimeError: not `now`."}
    one = {"torch": "2.13.0", "python": "3.11.7", "features": {"a": {"hooks": works, "reentrant": works}}}
    other = {"torch": "2.14.1", "python": "3.12.1", "features": {"a": {"hooks": works, "reentrant": refused}}}
    page = rendered({"a": "A table", "b": "A table"}, {"2.13": one, "2.14": other})
    assert "| a | works | 2.13: works; 2.14: refused [1](#notes) | 1 |" in page
    assert "| b | not run | not run |  |" in page
    assert "\n1. torch: `RuntimeError: not now.`\n" in page
    assert "torch 2.13.0 (Python 3.11.7) and torch 2.14.1 (Python 3.12.1)" in page


def a_row(program, **options):
    plan = {"replays": {"hooks": 1, "reentrant": 1}, "options": {}, "no_meaning": {}, "but": {}, **options}
    return Feature("a table", "a row", program, **plan)


def sine(call):
    x = torch.ones(3, requires_grad=True)
    call(lambda t: t.sin().exp(), x).sum().backward()
    return x.grad


def test_a_wrong_value_is_no_cell(engine):
    """Rule 1: it fails the test."""
    with pytest.raises(AssertionError, match="not equal"):
        try_out(a_row(lambda call: sine(call) * (1 if call.plain else 2)), engine)


def test_another_number_of_replays_is_no_cell(engine):
    """Rule 6: it fails the test."""
    with pytest.raises(AssertionError, match="1 replays where 2 are stated"):
        try_out(a_row(sine, replays={engine.name: 2}), engine)


def slip(error):
    def program(call):
        if not call.plain:
            raise error
        return sine(call)

    return program


def warns_into_an_error(call):
    if not call.plain:
        try:
            warnings.warn("of torch", UserWarning, stacklevel=1)
        except UserWarning as warning:
            raise RuntimeError from warning


@pytest.mark.parametrize("program", [slip(AttributeError()), slip(ValueError()), warns_into_an_error])
def test_a_slip_of_a_program_is_no_refusal(engine, program):
    """Rule 1: only what regrow raises is a cell, and what torch does; not what a filter for warnings made an error."""
    with pytest.raises((AttributeError, ValueError, RuntimeError)):
        try_out(a_row(program), engine)
