"""Configs of heads that somebody else wrote: no code is fetched, and no mistake ends in a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_head, tiny_target

from drafthead.heads.load import load_head


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("attn_implementation", "org/kernel", "attn_implementation asks for other code"),
        ("_attn_implementation", "org/kernel", "_attn_implementation asks for other code"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "asks for other code"),
        ("draft_vocab_size", "many", "not the config of a head"),
        ("draft_vocab_size", -1, "not the config of a head"),
        ("dtype", "no_such", "not the config of a head"),
    ],
)
def test_f73_a_config_that_asks_for_code_or_makes_no_sense_is_one_line(
    name: str, value: Any, said: str, tmp_path: Path
) -> None:
    tiny_head(tiny_target()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=said) as error:
        load_head(tmp_path)
    assert "\n" not in str(error.value)
