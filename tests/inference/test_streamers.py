"""transformers' streamers get through `speculate` what `generate` would put into them."""

from __future__ import annotations

from threading import Thread

import pytest
from calls import generate, own
from drafts import HalfRight, Oracle, own_greedy, prompt_of
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from drafthead.inference.target import Target
from drafthead.inference.warps import UnsupportedSamplingError

PROMPT = prompt_of(5)


class Kept(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.puts.append(value)

    def end(self) -> None:
        self.ended += 1


def test_streamers_get_what_generate_puts(target64: Target) -> None:
    """The prompt, then each token by itself, then the end, once."""
    theirs = Kept()
    truth = own(target64, [PROMPT], streamer=theirs)
    for drafter in (None, Oracle(truth.tolist()), HalfRight(truth.tolist(), 2, tree=True)):
        mine = Kept()
        generate(target64, drafter, [PROMPT], streamer=mine)
        assert [put.tolist() for put in mine.puts] == [put.tolist() for put in theirs.puts]
        assert mine.ended == theirs.ended == 1


def test_tokens_are_shown_as_rounds_end(target64: Target) -> None:
    """Not all of them at the end: at each verify pass, all tokens before it have been put."""
    text = own_greedy(target64, PROMPT, 12)
    mine = Kept()
    put: list[int] = []
    hook = target64.model.register_forward_hook(lambda *_: put.append(len(mine.puts)))
    try:
        generate(target64, Oracle([text]), [PROMPT], streamer=mine)
    finally:
        hook.remove()
    assert put == [1, 2, 7, 12], "prompt; the prefill's token; blocks of 5, 5 and 1"


def test_f46_nothing_is_put_after_the_end(target64: Target) -> None:
    text = own_greedy(target64, PROMPT, 12)
    mine = Kept()
    generate(target64, Oracle([text], 6), [PROMPT], streamer=mine, eos_token_id=text[5 + 3])
    new = [int(put) for put in mine.puts[1:]]
    assert new == text[5 : text.index(text[5 + 3], 5) + 1]


def test_text_streamers_print_the_text(
    target64: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    text = own_greedy(target64, PROMPT, 12)
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    generate(target64, HalfRight([text], 2), [PROMPT], streamer=streamer)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(text[5:]).rstrip("\n")


def test_an_iterator_in_another_thread_gets_whole_characters(target64: Target) -> None:
    """Together the whole text, and no half of a character that became whole."""
    tokenizer = tiny_tokenizer()
    wanted = "naïve 漢字 🙂 words"
    ids = tokenizer(wanted, add_special_tokens=False).input_ids
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    forced = {
        "prefix_allowed_tokens_fn": lambda _, seen: [ids[len(seen) - 5]],
        "max_new_tokens": len(ids),
    }
    drafter = HalfRight([[*PROMPT, *ids]], 3, 6)
    thread = Thread(
        target=generate, args=(target64, drafter, [PROMPT]), kwargs={**forced, "streamer": streamer}
    )
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == wanted
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_reader_does_not_wait_for_a_failed_run(target64: Target) -> None:
    def fail(ids: Tensor, scores: object) -> bool:
        raise RuntimeError("after the first token")

    mine = Kept()
    with pytest.raises(RuntimeError, match="after the first token"):
        generate(
            target64, None, [PROMPT], streamer=mine, stopping_criteria=StoppingCriteriaList([fail])
        )
    assert mine.ended == 1


def test_a_streamer_shows_one_row(target64: Target) -> None:
    mine = Kept()
    with pytest.raises(UnsupportedSamplingError, match="a streamer shows one row"):
        generate(target64, None, [PROMPT] * 2, streamer=mine)
    assert (len(mine.puts), mine.ended) == (0, 1)
