"""What is said of an evaluation in words: no more than it shows, and nothing left out."""

from __future__ import annotations

import evaluations

from drafthead.inference.summary import sentences, verdict
from drafthead.inference.tables import same_text


def test_a_simulated_figure_that_disagrees_is_told_at_once() -> None:
    result = evaluations.result(temperatures=(0.0,))
    result["simulated"]["head"]["agrees"] = False
    told = [said for said, _ in sentences(result, verdict(result, None))]
    assert any(said.startswith("Simulated and decoded tau of head disagree") for said in told)


def test_a_sampled_run_by_a_ratio_rule_promises_the_law_and_not_the_text() -> None:
    result = evaluations.result(temperatures=(1.0,))
    result["settings"]["rule"] = "rejection"
    told = verdict(result, evaluations.CERTIFICATE).headline
    assert told == "Lossless: the text follows the target’s own law"


def test_f64_no_gain_is_called_none() -> None:
    result = evaluations.result(temperatures=(0.0,))
    records = result["cells"][0]["records"]
    for r in records.values():
        if "tau" in r:
            r["speedup"], r["speedup_interval"] = 0.8, [0.7, 0.9]
    told = dict(sentences(result, verdict(result, None)))
    (bold,) = [said for said, strong in told.items() if strong]
    assert bold.startswith("No drafter was faster than plain decoding")
    records["head"]["speedup"], records["head"]["speedup_interval"] = 1.02, [0.97, 1.08]
    (bold,) = [said for said, strong in sentences(result, verdict(result, None)) if strong]
    assert bold.endswith("The interval reaches 1, so this shows no gain.")


def test_a_tie_in_float32_is_told_as_one_and_another_difference_fails() -> None:
    result = evaluations.result(temperatures=(0.0,))
    same = {"equal": 3, "of": 4, "tied": 1, "largest_gap": 1e-6, "tie": 4e-5, "dtype": "float32"}
    result["cells"][0]["records"]["head"]["identical"] = same
    found = verdict(result, None)
    assert found.kind == "checked"
    assert "but for 1 text that left it at a tie" in found.reason
    assert "(at most 1e-06 apart) within rounding (4e-05)" in found.reason
    table = same_text(result["cells"], "bfloat16")
    assert table is not None
    assert ("3 of 4, 1 tied", "gap 1e-06, tie up to 4e-05") in [row[3] for row in table.rows]
    for gap in (0.3, None):  # None: one text ends where the other goes on
        other = same | {"equal": 2, "largest_gap": gap}
        result["cells"][0]["records"]["head"]["identical"] = other
        found = verdict(result, None)
        assert (found.kind, "no tie within rounding" in found.reason) == ("failed", True)
        assert same_text(result["cells"], "bfloat16") is not None
