"""A certificate as a page: what is promised, what was checked, what is not promised.

Self-contained: no network, no script; light or dark as the reader's system is; fits a phone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Losslessness certificate: {{ c.target.name }}</title><style>
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #5c5c5c; --line: #d4d4d4;
  --good: #136c2e; --bad: #b3261e; --box: #f5f5f5 }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --soft: #a6a6a6;
  --line: #3d3d3d; --good: #6fd08c; --bad: #ff8a80; --box: #212121 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 52rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }
h1 { line-height: 1.2 } h2 { margin-top: 2.5rem }
.verdict { font-size: 1.25rem; font-weight: 600 }
.passed { color: var(--good) } .failed { color: var(--bad) }
.check { border-top: 1px solid var(--line); padding: .75rem 0 } .check p { margin: .25rem 0 }
.figure { font-variant-numeric: tabular-nums } .detail { color: var(--soft); font-size: .9rem }
pre { background: var(--box); padding: 1rem; white-space: pre-wrap; font-size: .85rem }
</style></head><body>
<h1>Losslessness certificate</h1>
<p>Text of <b>{{ c.target.name }}</b>, drafted by the <b>{{ c.head.type }}</b> head in
{{ c.head.folder }}.{% if c.target.adapted %} The head changes its target in memory: what is
lossless is the text of the target as adapted, which is not that of the published one.{% endif %}
</p>
<p class="verdict {{ 'passed' if c.passed else 'failed' }}">{{ verdict }}</p>
<h2>What is promised</h2><ul>{% for line in promised %}<li>{{ line }}</li>{% endfor %}</ul>
<h2>What was checked</h2>
{% for check in checks %}{{ row(check) }}{% endfor %}
<h2>What shows that the checks can see</h2>
<p>The same checks with a fault planted on purpose; each of these has to fail, and does where it
says “seen”.</p>
{% for check in controls %}{{ row(check) }}{% endfor %}
<h2>What is not promised</h2><ul>{% for line in limits %}<li>{{ line }}</li>{% endfor %}</ul>
<h2>Settings and versions</h2><pre>{{ settings }}</pre>
</body></html>
"""

ROW = """<div class="check"><p><b class="{{ 'passed' if check.passed else 'failed' }}">{{
'passed' if check.passed else 'FAILED' }}</b> {{ check.name }}</p>
<p class="figure">{{ check.figure }}</p><p class="detail">{{ check.detail }}</p></div>
"""

PROMISED = (
    "Greedy text is the target's own, token for token, whatever drafts, alone or in a batch.",
    "Coupled sampling: the same seed and stream give the same text with any drafter or none, in "
    "any batch and order.",
    "Rejection and block sampling draw from the target's own law, warps included.",
    "Both in float32 up to a tie of two tokens within rounding, which is measured here; in "
    "half precision the same, with a wider rounding.",
)

LIMITS = (
    "The same text on another device, in another dtype, with other kernels or versions: rounding "
    "differs there, and so may ties.",
    "The same text in half precision: a pass over several tokens rounds differently from one over "
    "one, so near ties may go either way. Each such place was checked to be a near tie.",
    "Rejection and block sampling give the target's law, not plain decoding's very draw of a seed.",
    "Lossy rules (typical acceptance): they change the text and cannot be certified.",
    "Other heads, targets or changed weights: the certificate is of these two.",
)


def page_of(certificate: Mapping[str, Any]) -> str:
    """The page of what `certify` gave."""
    environment = Environment(autoescape=True)
    row = environment.from_string(ROW)
    checks = certificate["checks"]
    failed = sum(not check["passed"] for check in checks)
    verdict = f"Passed: all {len(checks)} checks."
    if failed:
        verdict = f"Not passed: {failed} of {len(checks)} checks failed."
    settings = {k: v for k, v in certificate.items() if k not in ("checks", "passed")}
    page: str = environment.from_string(PAGE).render(
        c=certificate,
        verdict=verdict,
        promised=PROMISED,
        limits=LIMITS,
        checks=[check for check in checks if not is_control(check)],
        controls=[check for check in checks if is_control(check)],
        row=lambda check: Markup(row.render(check=check)),
        settings=json.dumps(settings, indent=2, default=str),
    )
    return page


def is_control(check: Mapping[str, Any]) -> bool:
    """Whether it is about what the other checks can see."""
    return str(check["name"]).startswith("control:")
