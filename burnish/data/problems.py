"""What is wrong with a row, as fields and as a sentence."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from burnish.utils.errors import DataError


class Place(NamedTuple):
    """Where a row comes from; as text: "train.jsonl, row 3 (line 4)".

    Attributes:
        file: as it was found, or the name of what stands for one.
        row: its number in the file, from 0.
        line: its first line, from 1, in formats that have lines.
    """

    file: str
    row: int
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}" + (f" (line {self.line})" if self.line is not None else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProblem:
    """One thing that is wrong with the data.

    Attributes:
        file: the file, or the name of what stands for one.
        row: the row's number in it, from 0; None: the file itself cannot be read.
        column: the column; None: it is not about one.
        seen: what is there.
        expected: what should be.
        message: all of it as a sentence, with the way out.
    """

    file: str
    row: int | None
    column: str | None
    seen: str
    expected: str
    message: str


class RowError(DataError):
    """A row cannot be used.

    Args:
        message: what is wrong and what to do, without the place.
        place: the row; None where it is put in by who knows it (`at`).
        column, seen, expected: see `RowProblem`.
    """

    def __init__(
        self, message: str, *, place: Place | None = None, column: str | None = None, seen: str = "", expected: str = ""
    ) -> None:
        super().__init__(f"{place}: {message}" if place is not None else message)
        self.reason = message
        self.place = place
        self.column = column
        self.seen = seen
        self.expected = expected

    def __reduce__(self) -> tuple[Any, ...]:
        return _row_error, (self.reason, self.place, self.column, self.seen, self.expected)

    def at(self, place: Place) -> "RowError":
        """The same error of the row at ``place``."""
        return _row_error(self.reason, place, self.column, self.seen, self.expected)

    @property
    def problem(self) -> RowProblem:
        """The fields of the error."""
        return RowProblem(
            file=self.place.file if self.place is not None else "",
            row=self.place.row if self.place is not None else None,
            column=self.column,
            seen=self.seen,
            expected=self.expected,
            message=str(self),
        )


class FileError(RowError):
    """A file cannot be read any further; stands among its rows."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message, expected="a file that can be read to its end")
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return FileError, (self.reason, self.file)

    @property
    def problem(self) -> RowProblem:
        """The fields of the error."""
        return replace(super().problem, file=self.file)


def _row_error(reason: str, place: Place | None, column: str | None, seen: str, expected: str) -> RowError:
    return RowError(reason, place=place, column=column, seen=seen, expected=expected)


def describe(value: Any) -> str:
    """A value's type and the beginning of the value, for messages."""
    return f"{type(value).__name__} ({value!r:.80})"
