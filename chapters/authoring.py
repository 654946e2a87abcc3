"""The commands for authors of the course, and the description of the machine. Each prints its results and returns
its exit code."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from chapters import answers, checking
from chapters import elsewhere as other_engines
from chapters import exercises as exercise_files
from chapters import notebooks as notebook_files
from chapters import weave as weaving
from chapters.commands import make_table
from chapters.course import Course, CourseError
from chapters.testing import copy_checkout, run_tests


def exercises(course: Course, args: argparse.Namespace, out: Console) -> int:
    its = [each for chapter in args.chapters for each in exercise_files.need(course, chapter)]
    if not args.chapters:
        its = list(exercise_files.every(course))
    if args.gate:
        code = gate(course, [checking.blank(course, each) for each in its], args.timeout, out)
        given = [pair for pair in answers.load(course) if pair[0] in its]
        for verdict in checking.accept(course, given, args.timeout):
            code |= bool(verdict.problem)
            result = f"failed: {verdict.problem}" if verdict.problem else "passed"
            out.print(f"{verdict.id} {result} ({verdict.seconds:.1f} s)", soft_wrap=True)
        return code
    table = make_table("exercise", "title", "lines", "file", "hints", "tests named")
    lines = {each: exercise_files.answer_lines(course.root, each) for each in its}
    for each in its:
        marks = ", ".join(mark for mark, has in (("core", each.core), ("large", each.large)) if has)
        title = f"{each.title} ({marks})" if marks else each.title
        table.add_row(each.id, title, str(lines[each]), each.file, str(len(each.hints)), str(len(each.tests)))
    out.print(table)
    out.print(f"{len(its)} exercises; the reference's answers have {sum(lines.values())} lines of code.")
    return 0


def gate(course: Course, changes: Sequence[checking.Change], timeout: float, out: Console) -> int:
    """Print for each change which test catches it."""
    if not changes:
        raise CourseError("there is nothing to prove")
    ok = True
    for verdict in checking.gate(course, changes, timeout):
        ok &= not verdict.problem
        result = f"failed: {verdict.problem}" if verdict.problem else f"passed: caught by {verdict.test}"
        out.print(f"{verdict.id} {result} ({verdict.seconds:.1f} s)", soft_wrap=True)
    return 0 if ok else 1


def weave(course: Course, args: argparse.Namespace, out: Console) -> int:
    woven = weaving.weave_all(course)
    problems = [problem for document in woven for problem in document.problems]
    drifted = [document for document in woven if document.drifted]
    for document in drifted:
        if args.check:
            out.print(document.diff(), soft_wrap=True)
        else:
            (course.root / document.name).write_bytes(document.after.encode())
            out.print(f"{document.name}: woven")
    for problem in problems:
        out.print(problem, soft_wrap=True)
    if drifted and args.check:
        out.print(f"{len(drifted)} differ from their source; `python -m chapters weave` rewrites them.")
    elif not drifted and not problems:
        out.print("Every listing and figure equals its source.")
    return 1 if problems or (args.check and drifted) else 0


def elsewhere(course: Course, args: argparse.Namespace, out: Console) -> int:
    page = other_engines.PAGE.read_text("utf-8")
    try:
        wrong = other_engines.moved(page)
    except OSError as error:
        raise CourseError(f"the lines of other engines cannot be read: {error}") from error
    for line in wrong:
        out.print(line, soft_wrap=True)
    out.print(f"{len(list(other_engines.lines(page)))} lines read, {len(wrong)} moved.")
    return 1 if wrong else 0


def notebooks(course: Course, args: argparse.Namespace, out: Console) -> int:
    known = {path.stem: path for path in course.notebooks()}
    names = [name.removesuffix(".ipynb") for name in args.names] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise CourseError(f"there is no notebook {', '.join(unknown)}; the notebooks are: {', '.join(known) or 'none'}")
    failed = False
    for path in (known[name] for name in names):
        if not args.execute:
            out.print(path.name)
            continue
        try:
            notebook_files.write(notebook_files.execute(path, course.root), path)
            out.print(f"{path.name}: executed")
        except notebook_files.NotebookError as error:
            failed = True
            out.print(f"{error}\n{path.name} was not changed.", soft_wrap=True)
    return 1 if failed else 0


def doctor(course: Course, args: argparse.Namespace, out: Console) -> int:
    """What `nanoserve doctor` finds on this machine, then the tests that show that the reference works on it."""
    from phase0_request.support.machine import describe
    from phase6_integration.support.machine_checks import findings

    for finding in findings(describe()):
        out.print(f"{finding.state.value:<9}{finding.name:<11}{finding.words}", soft_wrap=True)
    course.need_checkout("doctor's proof")
    files = [course.name(test) for test in sorted((course.root / "tests").glob("*/**/test_*.py"))]
    proofs = [file for file in files if "pytest.mark.proof" in (course.root / file).read_text("utf-8")]
    with out.status("running the proof"):
        copy = copy_checkout(course, course.private / "proof", {})
        run = run_tests(copy, proofs or ["tests"], timeout=args.timeout, marks="proof")
    reasons = Counter(result.error for result in run.results if result.outcome == "skipped")
    for reason, number in reasons.items():
        out.print(f"skipped here: {number} of the proofs: {reason.removeprefix('Skipped: ')}", soft_wrap=True)
    for result in run.failures:
        out.print(Text(f"failed: {result.line}", style="red"), soft_wrap=True)
    if run.stopped:
        out.print(run.stopped, soft_wrap=True)
    proved = run.count("passed") > 0 and not run.failures and not run.stopped
    count = f"{run.count('passed')} tests marked `proof` passed in {run.seconds:.1f} s"
    out.print(f"\nThe reference works here: {count}." if proved else f"\nNo proof: {count}. {run.last_line}")
    return 0 if proved else 1
