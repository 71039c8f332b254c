"""The page of an evaluation says what the result holds, stands alone, and takes any text."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import evaluations
import numpy as np
import pytest
from PIL import Image
from tiny import tiny_target, tiny_tokenizer

from drafthead.heads.eagle3 import Eagle3Settings
from drafthead.inference.compare import Comparison, compare
from drafthead.inference.evaluate import Settings
from drafthead.inference.plots import VARIABLES
from drafthead.inference.report import page as page_of
from drafthead.inference.report import write_evaluation
from drafthead.inference.summary import verdict
from drafthead.inference.tables import table_rows
from drafthead.inference.target import load_target

VOID = {"meta", "br", "hr", "img", "input", "link"}
GROUPS = ("by_category", "by_language", "by_context")
LOSSES = [(10 * i, 5 / (1 + i)) for i in range(12)]


class Page(HTMLParser):
    """Elements with their attributes, and the text inside each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {k: v or "" for k, v in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.found) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {k: v or "" for k, v in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self._open.pop()][0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        for element in self._open:
            self.found[element][2].append(data)

    def all(self, tag: str, **wanted: str) -> list[str]:
        """Texts of these elements; `class_` is one of theirs."""
        name = wanted.get("class_", "")
        return [
            "".join(text)
            for found, attributes, text in self.found
            if found == tag and (not name or name in attributes.get("class", "").split())
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of everything there is to show."""
    made = tmp_path_factory.mktemp("evaluation")
    (made / "certificate.json").write_text(json.dumps(evaluations.CERTIFICATE))
    (made / "tuning.json").write_text(json.dumps(evaluations.TUNING))
    assert write_evaluation(made, evaluations.result(), LOSSES) == made / "report.html"
    return made


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of texts that would do harm, in one language, over an earlier run's figures."""
    made = tmp_path_factory.mktemp("hostile")
    (made / "figures").mkdir()
    for name in ("language", "losses"):
        (made / "figures" / f"{name}.png").write_bytes(b"of an earlier run")
    write_evaluation(made, evaluations.hostile())
    return made


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_the_first_paragraph_says_by_itself_what_was_measured(page: Page) -> None:
    (first,) = page.all("p", class_="first")
    result = evaluations.result()
    records = result["cells"][0]["records"]
    best = max((r for r in records.values() if "tau" in r), key=lambda r: r["speedup"])
    worst = min(best["by_category"], key=lambda name: best["by_category"][name]["speedup"])
    for said in (
        "SmolLM2-135M-Instruct (135 M parameters, bfloat16)",
        "16 prompts (20 turns) of samples/test, at most 64 new tokens a turn",
        "at temperature 0 and 1 and batch 1, 4 and 16, 3 times over",
        "on a CPU (x86_64, 2 cores, 2 threads)",
        "head (eagle3) drafting chain:3",
        f"“{best['name']}”: {best['speedup']:.2f} times (95 % interval "
        + "{:.2f}–{:.2f}".format(*best["speedup_interval"]),
        f"{best['tokens_per_s']:.1f} tokens/s against {records['plain']['tokens_per_s']:.1f}",
        f"gains least on {worst}: ",
        "The text is the target’s own.",
        "11 of 16 answers of",
        "1 turn failed and counts nowhere (does not fit the context).",
        "5 rows of the prompt files were no prompts (no user turn: 2; tools: 3).",
    ):
        assert said in first


def test_each_cell_has_its_table_and_its_figures(page: Page) -> None:
    shown = page.all("tr")
    for cell in evaluations.result()["cells"]:
        for name, r in cell["records"].items():
            row = f"{name}1.00{r['tokens_per_s']:.1f}1.00"
            if "tau" in r:
                row = f"{name}{r['speedup']:.2f}" + "{:.2f}–{:.2f}".format(*r["speedup_interval"])
                row += f"{r['tokens_per_s']:.1f}{r['tau']:.2f}"
            assert any(re.sub(r"\s", "", line).startswith(row) for line in shown), row


def test_f61_f62_the_page_defines_its_figures(page: Page) -> None:
    meaning = dict(zip(page.all("dt"), page.all("dd"), strict=True))
    assert "the target’s own included" in meaning["Tau"]
    assert "all rounds" in meaning["Survival"]
    assert "running product is the survival" in " ".join(meaning["Conditional"].split())
    assert "the prefill" in meaning["Speed"]
    assert "does not shorten" in meaning["First token"]
    (header,) = [row for row in page.all("tr") if "decoded tau" in row]
    assert "simulated tau" in header, "beside the decoded one, and under another name"


def test_certificate_and_tuning_in_the_folder_are_shown(page: Page) -> None:
    rows = page.all("tr")
    assert sum("✓ passed" in row for row in rows) == 3
    assert any("law at T = 1" in row and "0.41" in row for row in rows)
    assert any("auto:6x4:20" in row and "31.2" in row for row in rows)


def test_a_token_is_shaded_by_its_depth_and_marked_where_a_draft_fell(page: Page) -> None:
    wanted = [t for s in evaluations.result()["samples"] for t in s["tokens"]]
    assert max(t["depth"] for t in wanted) > 6, "deeper than there are shades"
    shown = [
        (a["class"].split(), "".join(said)) for tag, a, said in page.found if "title" in a and tag
    ]
    assert len(shown) == len(wanted)
    for (classes, said), token in zip(shown, wanted, strict=True):
        assert said == token["text"].replace("\n", "↵\n")
        shades = [c for c in classes if c.startswith("d")]
        assert shades == [f"d{min(6, token['depth'])}"] * (token["depth"] > 0)
        assert ("fell" in classes) == token["fell"]


def test_figures_are_written_for_papers_and_none_is_left_of_an_earlier_run(
    folder: Path, page: Page, hostile: Path
) -> None:
    names = {"speed", "survival", "round", "category", "language", "context", "drift", "losses"}
    files = {path.stem: path for path in (folder / "figures").glob("*.png")}
    assert set(files) == names == {a["id"] for tag, a, _ in page.found if tag == "figure"}
    for path in files.values():
        with Image.open(path) as image:
            assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
            assert image.width == 960
            pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
        assert (pixels[0] == 255).all(), "on white"
        coloured = np.ptp(pixels.astype(int), axis=1) > 60
        assert coloured.mean() > 0.001, f"{path.name} has axes only"
    left = {path.stem for path in (hostile / "figures").iterdir()}
    assert left == names - {"losses", "language"}


def test_figures_follow_the_page_into_the_dark(text: str) -> None:
    style, body = text.split("</style>")
    drawings = re.findall(r"<svg.*?</svg>", body, re.S)
    assert len(drawings) == 8
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        fixed = re.sub(r"var\(--[\w-]+, #\w{6}\)", "", drawing)
        assert not re.findall(r"#[0-9a-f]{6}\b", fixed), "a colour that no scheme changes"
    for name in VARIABLES.values():
        assert style.count(f"--{name}:") == 2, "light and dark"
    ids = re.findall(r'\bid="([^"]+)"', body)
    assert len(ids) == len(set(ids)) > 100
    for used in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', body):
        assert set(used) & set(ids)


def test_the_page_asks_nobody_for_anything(page: Page, hostile: Path) -> None:
    for shown in (page, Page((hostile / "report.html").read_text(encoding="utf-8"))):
        tags = {tag for tag, _, _ in shown.found}
        assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
        for _, attributes, _ in shown.found:
            for name, value in attributes.items():
                assert not name.startswith("on")
                if name.split(":")[-1] in {"href", "src", "srcset", "action", "style"}:
                    assert "//" not in value
        (style,) = shown.all("style")
        assert "url(" not in style
        assert "@import" not in style


def test_text_that_would_do_harm_is_only_text(hostile: Path) -> None:
    page = Page((hostile / "report.html").read_text(encoding="utf-8"))
    assert "bold" not in page.all("b"), "the markup came through"
    spans = [said for said in page.all("span", class_="t") if said == evaluations.EVIL]
    assert len(spans) == 4
    assert any(evaluations.EVIL in head for head in page.all("th"))
    assert evaluations.EVIL in page.all("title")[0]


def test_what_a_head_loses_on_another_target_is_told(page: Page) -> None:
    assert any(said.startswith("Undecided: the head loses 7.8 %") for said in page.all("p"))
    rows = [re.sub(r"\s", "", row) for row in page.all("tr")]
    assert "all162.061.900.160.05–0.25" in rows
    assert "coding42.702.400.300.10–0.50" in rows
    several = evaluations.result(temperatures=(0.0,))
    several["drift"] = dict.fromkeys(("first", "second"), evaluations.DRIFT)
    shown = Page(page_of(several, [], None, None)).all("h3")
    assert {"first", "second"} <= set(shown)


def test_a_lossy_run_is_marked_everywhere() -> None:
    result = evaluations.result(lossy=True, temperatures=(0.0,))
    page = Page(page_of(result, [], None, None))
    assert page.all("title")[0].startswith("Lossy: ")
    (stamp,) = page.all("div", class_="stamp")
    assert "Lossy: the text is not the target’s own" in stamp
    names = page.all("th")
    for name in ("lookup", "merged"):
        assert names.count(f"{name} (lossy)") == 2 * 3, "in both tables of each batch"
        assert name not in names
    assert (
        "The text is not the target’s own: this is a lossy run." in page.all("p", class_="first")[0]
    )


def test_the_verdict_says_no_more_than_was_checked() -> None:
    result = evaluations.result(temperatures=(0.0,))
    assert verdict(result, None).kind == "checked"
    broken = copy.deepcopy(evaluations.CERTIFICATE) | {"passed": False}
    broken["checks"][1]["passed"] = False  # type: ignore[index]
    found = verdict(result, broken)
    assert (found.kind, "law at T = 1" in found.reason) == ("failed", True)
    for cell in result["cells"]:
        for r in cell["records"].values():
            r["identical"] = None
    assert verdict(result, None).kind == "unchecked"
    assert verdict(result, evaluations.CERTIFICATE).kind == "checked"
    result["cells"][1]["records"]["head"]["identical"] = {"equal": 3, "of": 4, "dtype": "float32"}
    found = verdict(result, evaluations.CERTIFICATE)
    assert (found.kind, "the text of head" in found.reason) == ("failed", True)
    result["lossy"] = True
    assert verdict(result, evaluations.CERTIFICATE).kind == "lossy"


def test_one_prompt_has_no_interval_anywhere(tmp_path: Path) -> None:
    """Nor empty brackets, and the gain is not sold as one."""
    result = evaluations.result(temperatures=(0.0,))
    for cell in result["cells"]:
        for r in cell["records"].values():
            for one in [r, *(g for by in GROUPS for g in r.get(by, {}).values() if g)]:
                for key in [key for key in one if key.endswith("_interval")]:
                    several = isinstance(one[key], list) and isinstance(one[key][0], list)
                    one[key] = [None] * len(one[key]) if several else None
    result["simulated"]["head"]["interval"] = result["drift"]["lost_interval"] = None
    result["drift"]["tau"]["interval"] = result["drift"]["other"]["interval"] = None
    result["drift"]["by_category"]["coding"]["lost_interval"] = None
    page = Page(write_evaluation(tmp_path, result).read_text(encoding="utf-8"))
    assert not [said for said in page.all("small") if "–" in said]
    (first,) = page.all("p", class_="first")
    assert "95 %" not in first
    assert "()" not in first
    assert "One prompt has no interval: this may be chance." in first
    records = result["cells"][0]["records"]
    for row in table_rows(records):
        assert not any("(" in cell for cell in row)


def test_a_certificate_of_another_head_or_target_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = evaluations.result(temperatures=(0.0,))
    result["heads"]["head"]["fingerprint"] = "own"
    target = {"fingerprint": result["target"]["fingerprint"]}
    made = evaluations.CERTIFICATE | {"target": target}
    shown = []
    for head, other in (("own", {}), ("another", {}), ("own", {"fingerprint": "another"})):
        told = made | {"head": {"fingerprint": head}, "target": target | other}
        (tmp_path / "certificate.json").write_text(json.dumps(told))
        page = write_evaluation(tmp_path, result).read_text(encoding="utf-8")
        shown.append("checks of the certificate passed" in page and "✓ passed" in page)
    assert shown == [True, False, False]
    assert caplog.text.count("a certificate of another head or target") == 2


def test_the_heads_own_tunings_are_shown_by_name(tmp_path: Path) -> None:
    """In place of one beside the page, which belongs to no head."""
    result = evaluations.result(temperatures=(0.0,))
    own = evaluations.TUNING | {"file": "runs/mine/tuning.json", "prompts": 12, "temperature": 0.0}
    result["tuning"] = {"head": own, "second": own | {"shapes": {"1": "off"}, "measured": {}}}
    (tmp_path / "tuning.json").write_text(json.dumps(evaluations.TUNING))
    page = Page(write_evaluation(tmp_path, result).read_text(encoding="utf-8"))
    titles = page.all("h3")
    assert ("second" in titles, "tuning.json" in titles) == (True, False)
    told = "Measured in bfloat16 on 12 prompts at temperature 0: runs/mine/tuning.json"
    assert page.all("p", class_="note").count(told) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"passed": true}'])
def test_a_broken_certificate_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_text(content)
    with pytest.raises(ValueError, match=r"certificate\.json: .*make it again"):
        write_evaluation(tmp_path, evaluations.result(temperatures=(0.0,)))


@pytest.mark.slow
def test_the_page_of_a_real_evaluation_shows_its_figures(tmp_path: Path) -> None:
    tiny_target(num_layers=6).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    target = load_target(tmp_path / "target")
    settings = Eagle3Settings(draft_vocab_size=None, intermediate_size=64)
    head = settings.build(target.contract((2, 4, 5)), target.config, None)
    head.save_pretrained(tmp_path / "head")
    rows = [
        {"id": "a", "category": "chat", "turns": ["Hello", "And now?"]},
        {"id": "b<i>", "category": "<i>", "turns": ["Why?"], "language": "de"},
        {"id": "none", "turns": []},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = Comparison(
        str(tmp_path / "target"),
        "float32",
        head=tmp_path / "head",
        prompts=(str(tmp_path / "prompts.jsonl"),),
        trees=("chain:2",),
        identity=1,
        identity_tokens=4,
        settings=Settings(max_new_tokens=8),
        temperatures=(0.0, 1.0),
    )
    result = compare(asked)
    write_evaluation(tmp_path / "out", result)
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    (first,) = page.all("p", class_="first")
    assert "2 prompts (3 turns)" in first
    assert "1 row of the prompt files was no prompt" in first
    assert "at temperature 0 and 1 and batch 1, on " in first
    (stamp,) = page.all("div", class_="stamp")
    assert "every drafter gave plain decoding’s ids on 1 prompt in float32" in stamp
    shown = [re.sub(r"\s", "", row) for row in page.all("tr")]
    for cell in result["cells"]:
        assert list(cell["records"]) == ["plain", "lookup", "head", "merged"]
        for name, r in cell["records"].items():
            speedup = f"{r['speedup']:.2f}" if "tau" in r else "1.00"
            assert any(row.startswith(name + speedup) for row in shown)
    assert len([s for s in page.all("div", class_="text") if s]) >= len(result["samples"]) == 4
    assert not page.all("i")
