"""Cloze tasks from a JSONL file: examples, the token sequences that score them, and what comes out.

One object a line:

    {"text": "..."}                                   the last word is to be predicted, as in LAMBADA
    {"context": "...", "target": "..."}               the target is; the two are joined as they are
    {"context": "...", "choices": [...], "answer": 0} the choice of highest probability is to be the right one

A target is predicted right where each of its tokens is the most probable one after those before it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_adacc.errors import UserError

_LAST_WORD = re.compile(r"(.*\S)(\s+\S+)\s*", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """``continuations``: of the context; one, or the choices. ``answer``: which is right. ``line``: in the file."""

    line: int
    context: str
    continuations: tuple[str, ...]
    answer: int = 0


@dataclass(frozen=True)
class Scored:
    """Tokens whose last ``scored`` are to be predicted from those before. ``example``, ``choice``: what it is of;
    ``truncated``: whether the beginning of the context was left out."""

    example: int
    choice: int
    tokens: tuple[int, ...]
    scored: int
    truncated: bool


@dataclass(frozen=True)
class Score:
    """Of one sequence: natural logarithm of the probability of its scored tokens, and whether each was the most
    probable one."""

    example: int
    choice: int
    log_probability: float
    greedy: bool


def read(path: str) -> list[Example]:
    """The examples of a file. Raises UserError, naming the line, for what is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"The task {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"The task {path} is not UTF-8: byte {error.start}.") from None
    found = [_example(text, number, path) for number, text in enumerate(lines, 1) if text.strip()]
    if not found:
        raise UserError(f"The task {path} has no examples: give one JSON object a line.")
    return found


def _example(text: str, line: int, path: str) -> Example:
    where = f"Line {line} of {path}"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is no JSON: {error}.") from None
    match content:
        case {"text": str(whole)}:
            parts = _LAST_WORD.fullmatch(whole)
            if parts is None:
                raise UserError(f"{where} needs a text of at least two words: the last is predicted from the others.")
            return Example(line, parts[1], (parts[2],))
        case {"context": str(context), "target": str(target)} if context and target:
            return Example(line, context, (target,))
        case {"context": str(context), "choices": [*choices], "answer": int(answer)} if context:
            right = all(isinstance(choice, str) and choice for choice in choices) and len(choices) >= 2
            if right and not isinstance(answer, bool) and 0 <= answer < len(choices):
                return Example(line, context, tuple(choices), answer)
            raise UserError(f"{where} needs at least two choices, each text, and as answer the number of one, from 0.")
    raise UserError(
        f'{where} must be {{"text": ...}}, {{"context": ..., "target": ...}} or {{"context": ..., "choices": [...], '
        '"answer": 0}, with texts that are not empty.'
    )


def sequences(
    examples: Sequence[Example], tokenize: Callable[[str], Sequence[int]], longest: int
) -> list[Scored]:  # fmt: skip
    """One for each continuation; of what is longer than the model's ``longest`` inputs, the end.

    Context and continuation are tokenized together, and each alone only where a token reaches over their border.
    Raises UserError for a continuation that does not fit, or has no tokens."""
    found = []
    for index, example in enumerate(examples):
        context = list(tokenize(example.context))
        for choice, continuation in enumerate(example.continuations):
            tokens = list(tokenize(example.context + continuation))
            if tokens[: len(context)] != context:
                tokens = context + list(tokenize(continuation))
            scored = len(tokens) - len(context)
            if not context or not 0 < scored <= longest:
                raise UserError(
                    f"Line {example.line} of the task has {len(context)} tokens of context and {scored} to be "
                    f"predicted: there must be at least one of each, and at most {longest} (--seq-length) to predict."
                )
            kept = tokens[-longest - 1 :]
            found.append(Scored(index, choice, tuple(kept), scored, len(kept) < len(tokens)))
    return found


def summarize(
    examples: Sequence[Example], asked: Sequence[Scored], scores: Iterable[Score]
) -> dict[str, Any]:  # fmt: skip
    """The result as JSON's types.

        accuracy           share of right examples; accuracy_se = sqrt(a (1 - a) / n)
        perplexity         exp(- mean over the examples of log p(right continuation)), the LAMBADA figure
        token_perplexity   exp(- sum of log p(right continuation) / number of its tokens)

    Raises ValueError where scores are missing."""
    by_key = {(score.example, score.choice): score for score in scores}
    lengths = {(one.example, one.choice): one for one in asked}
    details, total, tokens = [], 0.0, 0
    for index, example in enumerate(examples):
        own = [by_key.get((index, choice)) for choice in range(len(example.continuations))]
        known = [score for score in own if score is not None]
        if len(known) != len(own):
            raise ValueError(f"no score for line {example.line}")
        right = known[example.answer]
        best = max(range(len(known)), key=lambda choice: known[choice].log_probability)
        correct = right.greedy if len(known) == 1 else best == example.answer
        total += right.log_probability
        tokens += lengths[index, example.answer].scored
        details.append({"line": example.line, "correct": correct, "log_probability": right.log_probability})
    count = len(examples)
    accuracy = sum(bool(one["correct"]) for one in details) / count
    return {
        "examples": count,
        "accuracy": accuracy,
        "accuracy_se": math.sqrt(accuracy * (1 - accuracy) / count),
        "perplexity": _exp(-total / count),
        "token_perplexity": _exp(-total / tokens),
        "target_tokens": tokens,
        "truncated": sum(one.truncated for one in asked),
        "details": details,
    }


def _exp(value: float) -> float | None:
    """None where it is beyond a float: a model that gives the targets no probability."""
    try:
        found = math.exp(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
