"""What other libraries' errors become in ours."""

import errno
import io
import os
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lockstep.errors import UserError, reason, refusal, shown, unknown, with_article


def _of_an_image() -> Exception:
    with pytest.raises(OSError, match="cannot identify") as caught:
        Image.open(io.BytesIO(b"no image"))
    return caught.value


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad \x1b[1mthing\x1b[0m here\nand more"), "bad thing here"),
        (EOFError(), "EOFError"),
        (KeyError(101), "KeyError 101"),
        (RuntimeError("  "), "RuntimeError"),
        (_of_an_image(), "cannot identify image file"),
    ],
)
def test_a_reason_is_one_line_of_words(error: Exception, text: str) -> None:
    assert reason(error) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/path"), "No space left on device"),
        (OSError("no number"), "no number"),
        (ValueError("embedded null byte\nand more"), "embedded null byte"),
        (_of_an_image(), "cannot identify image file"),
    ],
)
def test_a_refusal_is_the_systems_own_words_without_the_path(error: Exception, text: str) -> None:
    assert refusal(error) == text


@given(st.text() | st.binary().map(os.fsdecode))
def test_what_is_shown_moves_no_cursor_and_can_be_written(text: str) -> None:
    found = shown(text)
    assert not [c for c in found if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in "\u200e\u202e\u2066"]
    assert found.encode().decode() == found == shown(found)
    assert len(found) == len(text) or "\\" in found
    assert shown("\n".join((text, text)), "\n").count("\n") == 2 * text.count("\n") + 1


def test_letters_of_every_script_are_shown_as_they_are() -> None:
    for text in (
        "caf\u00e9",
        "\u732b\u3000\u72ac",
        "\u0646\u0645\u06cc\u200c\u062f\u0627\u0646\u0645",
        "\U0001f469\u200d\U0001f33e",
        "a\\b",
    ):
        assert shown(text) == text
    assert shown("a\x1b[2J\r\tb\u202e" + os.fsdecode(b"\xff.jpg")) == r"a\x1b[2J\r\tb\u202e\xff.jpg"


def test_a_name_in_another_case_finds_its_like() -> None:
    known = ("cifar10", "digits", "IMAGENET1K_V1")
    assert unknown("recipe", "CIFAR10", known).remedy == "Did you mean cifar10?"
    assert unknown("weights", "imagenet1k_v1", known).remedy == "Did you mean IMAGENET1K_V1?"


def test_a_type_has_its_article() -> None:
    made = 1, "", None, np.zeros(1), UserError("")
    assert [*map(with_article, made)] == ["an int", "a str", "a NoneType", "an ndarray", "a UserError"]
