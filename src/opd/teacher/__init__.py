"""Teachers: they score every token of the student's completions."""

from __future__ import annotations

from opd.teacher.base import Teacher
from opd.teacher.model import ModelTeacher
from opd.teacher.self_ import SelfTeacher

__all__ = ["ModelTeacher", "SelfTeacher", "Teacher"]
