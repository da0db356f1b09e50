"""Spec-Bench: 480 questions of six tasks, of which the first turn is used."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pspec.errors import ConfigError

OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Tasks that are one category; all other categories are MT-bench's."""
TASKS = ("mt-bench", *OTHERS)


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        number: ``question_id`` of the file.
        task: one of :data:`TASKS`.
        text: the first turn.
    """

    number: int
    task: str
    text: str


def read_questions(path: Path) -> list[Question]:
    """All questions of a Spec-Bench file, in its order.

    Raises:
        ConfigError: for a file that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return [
            Question(int(row["question_id"]), task_of(row["category"]), row["turns"][0])
            for row in rows
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--questions {path.name}: expected Spec-Bench's question.jsonl, lines with "
            "question_id, category and turns"
        ) from error


def task_of(category: str) -> str:
    """The task a category belongs to."""
    return category if category in OTHERS else "mt-bench"


def select(questions: Iterable[Question], per_task: int) -> list[Question]:
    """The first ``per_task`` of every task, in the file's order."""
    taken = dict.fromkeys(TASKS, 0)
    chosen = []
    for question in questions:
        if taken[question.task] < per_task:
            taken[question.task] += 1
            chosen.append(question)
    return chosen
