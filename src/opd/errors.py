"""The one exception that a user can cause."""

from __future__ import annotations


class OpdError(Exception):
    """What happened, why, and how to fix it: every error that a user's input can cause ends here.

    Args:
        what: one sentence that says what could not be done.
        why: the cause, with the figures or names that show it.
        fix: what the user can do about it, concrete enough to paste.
    """

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"
