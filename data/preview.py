"""How an audit is shown: lines for a terminal, and one self-contained HTML page.

Data is shown, never obeyed: control characters and markup of a row come out as what they are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from jinja2 import Environment

from drafthead.data.audit import Audit, Comparison, Preview
from drafthead.data.rows import Origin

_BAR = 30
"""Width of the longest bar of the histogram, in characters."""
_LONG_PROMPT, _LONG_ANSWER = 300, 700
"""Characters of a run of tokens that a terminal shows; of longer ones the middle is left out."""
_LEAST_LEFT_OUT = 100
_TRAINED, _OFF, _DIM = "\x1b[30;42m", "\x1b[0m", "\x1b[2m"
# Control characters, and those that turn the direction of text around.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def summary(audit: Audit) -> Iterator[str]:
    """Yield the figures, one to a line."""
    yield (
        f"{audit.read:,} rows read, {audit.conversations:,} of them give {audit.rows:,} rows to "
        f"train on, with {audit.tokens:,} tokens"
    )
    yield (
        f"trained: {audit.trained:,} tokens, {audit.share:.1%} of all"
        f" ({'the template’s generation markers' if audit.by_markers else 'exact rendering'})"
    )
    if audit.split:
        yield (
            f"{audit.split:,} conversations give several rows: the template shows their earlier "
            "answers otherwise than they were emitted"
        )
    yield _answers(audit)
    if audit.unfinished or audit.looping:
        where = f" ({', '.join(audit.looping[:3])})" if audit.looping else ""
        yield (
            f"{audit.unfinished:,} conversations end at a limit (finish: length), "
            f"{len(audit.looping):,} have an answer that ends in a loop{where}"
        )
    at = audit.percentiles()
    yield "length of a row in tokens: " + ", ".join(f"{k} {v:,}" for k, v in at.items())
    yield from _histogram(audit)
    if audit.cut:
        yield (
            f"{audit.cut:,} rows are longer than max_length {audit.max_length}: "
            f"{audit.cut_tokens:,} tokens are cut off, {audit.cut_trained:,} of them answers"
        )
    yield f"{audit.skips.total:,} rows skipped" + (":" if audit.skips.total else "")
    for reason, references in sorted(audit.skips.rows.items(), key=lambda item: -len(item[1])):
        more = ", …" if len(references) > 3 else ""
        yield f"  {len(references):>7,}  {reason}  [{', '.join(references[:3])}{more}]"
    if audit.comparison is not None:
        yield from _comparison(audit.comparison)


def _answers(audit: Audit) -> str:
    said: dict[Origin, str] = {
        "text": "tokenised from their text",
        "kept": "with the ids that the target emitted",
        "re-encoded": "encoded anew, since this tokenizer reads their ids as another text",
        "ids": "given as ids with a mask",
    }
    parts = [f"{audit.answers[key]:,} {text}" for key, text in said.items() if audit.answers[key]]
    return "answers: " + ", ".join(parts)


def _histogram(audit: Audit) -> Iterator[str]:
    bins = audit.histogram()
    most = max(count for _, count in bins)
    for edge, count in bins:
        bar = "█" * max(round(_BAR * count / most), bool(count))
        yield f"  ≤ {edge:>6,}  {count:>7,}  {bar}"


def _comparison(found: Comparison) -> Iterator[str]:
    given = ", ".join(f"{name}={value}" for name, value in found.settings.items())
    yield (
        f"compared with {given}: {found.different:,} of {found.conversations:,} conversations "
        f"differ, in {found.different_tokens:,} of {found.tokens:,} tokens"
    )
    if found.refused:
        yield f"  {found.refused:,} conversations can be rendered with only one of the two"
    if found.first is not None:
        first = found.first
        yield f"  first in {first.id} at token {first.position}:"
        yield f"    here   {_quoted(first.here)}"
        yield f"    there  {_quoted(first.there)}"


def _quoted(text: str) -> str:
    return seen(text).replace("\n", "↵")


def seen(text: str) -> str:
    """Return the text with characters that a terminal would obey shown by their codes."""
    return _UNSEEN.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def terminal_text(preview: Preview, colours: bool) -> str:
    """Return a row as text in which trained tokens stand out: by colour, or between ⟦ and ⟧."""
    parts = []
    for trained, groups in itertools.groupby(preview.groups, key=lambda group: group.trained):
        text = "".join(group.text for group in groups)
        text = seen(_shortened(text, _LONG_ANSWER if trained else _LONG_PROMPT))
        if colours:
            text = "".join(
                (_TRAINED if trained else _DIM) + line + _OFF for line in _with_ends(text)
            )
        elif trained:
            text = f"⟦{text}⟧"
        parts.append(text)
    return "".join(parts)


def _with_ends(text: str) -> Iterator[str]:
    """Yield lines; a colour must not run to the edge of the terminal, so each ends by itself."""
    lines = text.split("\n")
    for line in lines[:-1]:
        yield f"{line}↵\n"
    yield lines[-1]


def _shortened(text: str, most: int) -> str:
    if len(text) <= most + _LEAST_LEFT_OUT:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }
pre { overflow-x: auto; background: #f4f4f4; padding: 1rem }
.row { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid #ccc; padding: 1rem; color: #666 }
.row b { font-weight: normal; color: #000; background: #bfe8bf; border-bottom: 2px solid #2a7d2a }
.row span, .row b { border-left: 1px solid #ddd }
</style></head><body>
<h1>{{ title }}</h1><pre>{{ summary }}</pre>
<p>Below, <span class="row" style="border: 0; padding: 0"><b>marked</b></span> tokens are trained:
what the target itself emits. The others are what it is given. A thin line separates tokens; hold
the pointer over one for its place and id.</p>
{% for row in rows %}<h2>{{ row.id }}</h2>
<div class="row">{% for at, group, text in row.groups %}{% if group.trained %}<b title="{{ at }}">{{
text }}</b>{% else %}<span title="{{ at }}">{{ text }}</span>{% endif %}{% endfor %}</div>
{% endfor %}</body></html>
"""


def page(audit: Audit) -> str:
    """Return the audit as an HTML page of its own: no network, no script, every text escaped."""
    rows = []
    for row in audit.previews:
        place, groups = 0, []
        for group in row.groups:
            ids = ", ".join(map(str, group.ids))
            groups.append((f"token {place}: {ids}", group, _visible(group.text)))
            place += len(group.ids)
        rows.append({"id": row.id, "groups": groups})
    render: Callable[..., str] = Environment(autoescape=True).from_string(PAGE).render
    title = f"What is trained of {', '.join(audit.sources)}"
    return render(title=title, summary="\n".join(summary(audit)), rows=rows)


def _visible(text: str) -> str:
    return seen(text).replace("\n", "↵\n").replace("\t", "→\t")
