"""Every sentence that the template of a card holds is in some card: none of it is out of reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cards import REFERENCE, a_run, certified, evaluated
from jinja2 import Environment, nodes
from ladder import REDUCED, ladder_head
from tiny import tiny_target
from toy_head import ToySettings

import drafthead.heads
from drafthead.heads.card import RunFacts, card
from drafthead.heads.contract import LAST, describe
from drafthead.heads.medusa2 import Medusa2Settings


def sentences() -> list[str]:
    """What stands in the template between its tags, each a piece of one line."""
    (folder,) = drafthead.heads.__path__
    template = Environment().parse((Path(folder) / "card.md.j2").read_text(encoding="utf-8"))
    pieces = [data.data for data in template.find_all(nodes.TemplateData)]
    return [line.strip() for piece in pieces for line in piece.splitlines() if line.strip()]


def test_every_sentence_of_the_template_is_in_a_card(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "run.json").write_text('{"machine": null}')
    config = (run / "config.yaml").read_text()
    assert "positions: null" in config
    (run / "config.yaml").write_text(config.replace("positions: null", "positions: 1000000"))
    odd = RunFacts.read(run)
    away = {"decoded_tau": 1.2, "simulated_tau": 1.5, "agrees": False, "cause": "a norm"}
    a_run(tmp_path / "away", agreement=away)
    ended = RunFacts.read(tmp_path / "away")
    (run / "result.json").unlink()
    stopped = RunFacts.read(run)
    little = evaluated() | {
        "prompts": 3, "turns": 4, "repeats": 2, "lossy": True, "trees": ["chain:2", "chain:3"],
        "failed": [{"id": "a"}], "skipped": {"x": 1},
        "settings": {"rule": "typical", "top_k": 5, "top_p": 0.9},
        "simulated": {"head": {"tau": 1.2, "decoded_tau": 2.0, "agrees": False}},
    }  # fmt: skip
    own = little["cells"][0]["records"]["head"]
    little["cells"][0]["records"] |= {f"head {tree}": own for tree in little["trees"]}
    own["identical"] = {"equal": 3, "of": 4, "largest_gap": 0.01}
    own["survival"] = []
    cards = [
        card(REFERENCE, evaluation=evaluated(), certificate=certified(), run=odd, repo="me/head"),
        card(REFERENCE, evaluation=little, certificate=certified(passed=False), run=ended),
        card(REFERENCE, run=stopped),
    ]
    for kind in ("medusa", "hydra++", "eagle3-whole"):
        ladder_head(kind, tiny_target()).save_pretrained(tmp_path / kind)
        cards += [card(tmp_path / kind, licence="unknown", base_model="org/base")]
    target = tiny_target()
    settings = Medusa2Settings(draft_vocab_size=len(REDUCED))
    contract = describe(target, None, (LAST,), {"enable_thinking": False}).model_copy(
        update={"norm_offset": 1.0, "logit_softcap": 30.0, "revision": "abc"}
    )
    toy = ToySettings().build(contract, target.config, None)
    toy.save_pretrained(tmp_path / "toy")
    adapted = settings.build(contract, target.config, REDUCED)
    adapted.save_pretrained(tmp_path / "adapted")
    tuned = {"machine": {"device": "CPU"}, "dtype": "float32", "shapes": {"1": "chain:2"}}
    (tmp_path / "adapted" / "tuning.json").write_text(json.dumps(tuned))
    cards += [card(tmp_path / "adapted"), card(tmp_path / "toy")]
    told = "\n".join(cards)
    assert len(sentences()) > 150
    assert [line for line in sentences() if line not in told] == []


@pytest.mark.parametrize("repo", [None, "me/my-head"])
def test_a_card_says_how_to_install_and_where_a_head_is_named(repo: str | None) -> None:
    text = card(REFERENCE, repo=repo)
    first, *then = text.split("```bash\n")[1].split("```")[0].splitlines()
    assert first.startswith("pip install ./drafthead  # a checkout of its repository")
    assert "pip install drafthead" not in text, "no index has it"
    assert len(then) == (1 if repo is None else 2)
    assert ("`--head hub:me/my-head` stands for a pulled copy" in text) == (repo is not None)
