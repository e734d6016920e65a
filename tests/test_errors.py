"""The one exception family: complete, printable and safe for a terminal."""

import pytest

from ckptbridge import errors
from ckptbridge.errors import CkptBridgeError, FormatError, InterruptedByUser, printable


def family() -> list[type[CkptBridgeError]]:
    found, waiting = [], [CkptBridgeError]
    while waiting:
        cls = waiting.pop()
        found.append(cls)
        waiting += cls.__subclasses__()
    return [cls for cls in found if cls.__module__ == errors.__name__]


def test_every_kind_has_a_code_of_its_own_and_a_remedy() -> None:
    kinds = family()
    assert len(kinds) >= 13
    assert len({cls.code for cls in kinds}) == len(kinds)
    for cls in kinds:
        if cls is not InterruptedByUser:
            assert "remedy: " in str(cls("Something is wrong."))


def test_a_remedy_that_is_given_is_the_one_that_is_shown() -> None:
    error = FormatError("It is cut.", remedy="Copy it again.", file="a.ckpt", offset=7, tensor=None)
    assert str(error) == "It is cut.\n  file: a.ckpt\n  offset: 7\n  remedy: Copy it again."
    assert error.to_dict() == {
        "code": "format",
        "what": "It is cut.",
        "where": {"file": "a.ckpt", "offset": 7},
        "remedy": "Copy it again.",
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[31mred", "\\x1b[31mred"), ("a\nb", "a\\x0ab"), ("\u202egnp", "\\u202egnp"), ("層.重み", "層.重み")],
)
def test_names_from_files_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert shown in str(FormatError("Bad.", tensor=text))


def test_a_stop_carries_the_exit_code_of_its_signal() -> None:
    assert InterruptedByUser(2).exit_code == 130
    assert InterruptedByUser(15).exit_code == 143
