"""Page with one line per table and figure of the papers, drawn from committed results alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kalmix.files import replace_file
from kalmix_bench.papers.entries import Entry, Paper
from kalmix_bench.papers.quantities import CommittedResults
from kalmix_bench.papers.score_tables import draw_table
from kalmix_bench.papers.status import DIFFERS, MEANINGS, NOT_RUN, Comparison, Outcome, outcome

RESULTS = "bench/results"
INTRODUCTION = f"""\
# The papers' tables and figures

**Question.** Which tables and figures of the four papers are reproduced here?

**Setting.** A command compares the numbers and rankings that the papers print with the files in `{RESULTS}`, and
writes this page. Nobody types a status: to change one, commit results and run the command again. Printed numbers and
explanations are in `bench/src/kalmix_bench/papers`.

Command: `kalmix bench report {RESULTS} --papers docs/results/papers.md`.
"""
QUALIFIERS = """\
*In part*: something that the table or figure shows has no result here. *In small*: our models or experiments are
smaller than the paper's. A number of one seed has no standard error, so it must equal the printed one, rounded.
"""
_SHOWN = 2  # comparisons that a line shows, of each kind


def write(papers: Sequence[Paper], results: CommittedResults, path: Path) -> None:
    """Write the page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as partial:
        partial.write_text(draw(papers, results), encoding="utf-8")


def draw(papers: Sequence[Paper], results: CommittedResults) -> str:
    """Return the page as Markdown."""
    outcomes = [[outcome(entry, results) for entry in paper.entries] for paper in papers]
    meanings = [f"| {status} | {meaning} |" for status, meaning in MEANINGS.items()]
    parts = [
        INTRODUCTION,
        "\n".join(["| status | meaning |", "|---|---|", *meanings]) + "\n",
        QUALIFIERS,
        _counts(papers, outcomes),
    ]
    for paper, ours in zip(papers, outcomes, strict=True):
        title = f"[{paper.title}]({paper.link})" if paper.link else paper.title
        lines = [_line(entry, one, results) for entry, one in zip(paper.entries, ours, strict=True)]
        head = ["| | content | status | comparison | details |", "|---|---|---|---|---|"]
        note = [f"{paper.note}\n"] if paper.note else []
        parts += [f"## {title}\n", *note, "\n".join([*head, *lines]) + "\n"]
        parts += [table for one in paper.score_tables if (table := draw_table(one, results))]
    return "\n".join(parts)


def _counts(papers: Sequence[Paper], outcomes: Sequence[Sequence[Outcome]]) -> str:
    """Return a table with the number of lines of each status."""
    lines = [f"| lines below | {' | '.join(MEANINGS)} |", "|---|" + "---|" * len(MEANINGS)]
    for paper, ours in zip(papers, outcomes, strict=True):
        counts = Counter(one.status for one in ours)
        lines.append(f"| {paper.title} | " + " | ".join(str(counts[status] or "") for status in MEANINGS) + " |")
    return "\n".join(lines) + "\n"


def _line(entry: Entry, found: Outcome, results: CommittedResults) -> str:
    status = f"**{found.status}**" + (f", {found.qualifier}" if found.qualifier else "")
    page = f"[{Path(entry.page).stem}]({entry.page})" if entry.page else ""
    ran = [one for one in found.comparisons if one.agrees is not None or one.is_unlearned]
    used = {file for one in ran for file in one.files} | {entry.picture_rows}
    files = [file for file in results.existing(entry.files) if file in used]
    details = ", ".join([*([page] if page else []), *(f"`{RESULTS}/{file}`" for file in files)])
    return f"| {entry.label} | {entry.subject} | {status} | {describe(entry, found)} | {details} |"


def describe(entry: Entry, found: Outcome) -> str:
    """Return sentences about the comparisons of an entry, and why results differ or are missing."""
    numbers = [one for one in found.comparisons if one.agrees is not None and not one.is_order]
    orders = [one for one in found.comparisons if one.agrees is not None and one.is_order]
    missing = [one for one in found.comparisons if one.agrees is None and not one.is_unlearned]
    unlearned = [one for one in found.comparisons if one.is_unlearned]
    limits = " and limits" if any("claimed" in one.text for one in numbers) else ""
    sentences = [entry.no_experiment, *_sentences(numbers, f"printed numbers{limits} agree")]
    sentences += _sentences(sorted(orders, key=lambda one: one.distance), "rankings hold")
    held_out = [one.on_validation for one in numbers if one.on_validation is not None]
    if held_out:
        sentences.append(f"If validation rows choose the epoch, {sum(held_out)} of {len(held_out)} agree.")
    sentences.append(_seeds(entry, found.comparisons))
    if unlearned:
        count, names = len(unlearned), ", ".join(dict.fromkeys(one.what for one in unlearned))
        undecided = "1 ranking is" if count == 1 else f"{count} rankings are"
        sentences.append(f"{undecided} undecided, because neither layer has learned the task: {names}.")
    if numbers or orders:
        sentences.append(_count_missing(missing))
    sentences += [entry.explanation if found.status == DIFFERS else "", entry.remark]
    if entry.pictures:
        links = ", ".join(f"[{Path(path).stem}]({path})" for path in entry.pictures)
        sentences.append(f"Drawn here: {links}.")
    if found.has_gaps and entry.not_run:
        names = f"{_name_missing(found.comparisons) or 'the rest'}, " if entry.not_run.startswith("for ") else ""
        sentences.append(_capitalize(entry.not_run) if found.status == NOT_RUN else f"Not run: {names}{entry.not_run}")
    if entry.tests:
        sentences.append(f"Test: {', '.join(f'`{test}`' for test in entry.tests)}.")
    return " ".join(sentence for sentence in sentences if sentence)


def _seeds(entry: Entry, comparisons: Sequence[Comparison]) -> str:
    """Return the number of seeds of results, or its range, and the paper's; empty if none depends on a seed."""
    counts = [one.seeds for one in comparisons if one.seeds]
    if not counts:
        return ""
    fewest, most = min(counts), max(counts)
    ours = f"{fewest} to {most} seeds" if fewest < most else "One seed" if most == 1 else f"{most} seeds"
    return f"{ours}, {entry.seeds} in the paper." if entry.seeds else f"{ours}."


def _count_missing(missing: Sequence[Comparison]) -> str:
    """Return a sentence about comparisons without a result; empty if there are none."""
    orders = sum(one.is_order for one in missing)
    counts = {"printed number": len(missing) - orders, "ranking": orders}
    parts = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
    return f"{' and '.join(parts)} {'has' if len(missing) == 1 else 'have'} no result here." if parts else ""


def _name_missing(comparisons: Sequence[Comparison]) -> str:
    """Return the layers without results, with their tasks if others have one; empty if none is named."""
    layers: dict[str, list[str]] = {}  # by tasks
    for layer in dict.fromkeys(one.layer for one in comparisons if one.layer):
        own = [one for one in comparisons if one.layer == layer]
        tasks = [one.task for one in own if one.agrees is None]
        if tasks:
            layers.setdefault("" if len(tasks) == len(own) else f" ({', '.join(tasks)})", []).append(layer)
    return "; ".join(", ".join(names) + tasks for tasks, names in layers.items())


def _sentences(comparisons: Sequence[Comparison], claim: str) -> list[str]:
    """Return how many comparisons agree, and those that do not, the farthest first; if all agree, the first ones."""
    if not comparisons:
        return []
    if len(comparisons) == 1:
        return [_sentence([comparisons[0]])]
    wrong = sorted((one for one in comparisons if not one.agrees), key=lambda one: -one.distance)
    shown = wrong or list(comparisons)
    more = f" ({len(shown) - _SHOWN} more)" if len(shown) > _SHOWN else ""
    count = f"{len(comparisons) - len(wrong)} of {len(comparisons)} {claim}."
    return [count, _sentence(shown[:_SHOWN], "Not: " if wrong else "", more)]


def _sentence(comparisons: Sequence[Comparison], before: str = "", after: str = "") -> str:
    """Return one sentence; comparisons of the same numbers name them once."""
    by_name: dict[str, list[str]] = {}
    for one in comparisons:
        by_name.setdefault(one.what, []).append(one.text)
    text = before + "; ".join(f"{what}: {'; '.join(texts)}" for what, texts in by_name.items())
    return f"{_capitalize(text)}{after}."


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]
