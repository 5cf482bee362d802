"""What other libraries' errors become in ours."""

import errno
import io

import pytest
from PIL import Image

from lockstep.errors import reason, refusal


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
