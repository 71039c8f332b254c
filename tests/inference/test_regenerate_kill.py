"""`drafthead regenerate`, killed three times over: it goes on after what was finished each time."""

from __future__ import annotations

from pathlib import Path

from kill_regenerate import CONVERSATIONS, part, regenerating
from killing import KillAt, Run, count, run_until_killed


def finished(root: Path) -> list[bytes]:
    """The whole lines of the part file behind its header."""
    return [line for line in part(root).read_bytes().splitlines(True)[1:] if line.endswith(b"\n")]


def answered(run: Run) -> int:
    """Conversations that a run appended."""
    places = [p for p in run.points if p.what == "after fsync" and p.path.endswith(".part")]
    return len(places)


def test_three_kills_cost_three_conversations_at_most(tmp_path: Path) -> None:
    job, straight, root = regenerating(tmp_path), tmp_path / "straight", tmp_path / "root"
    straight.mkdir()
    root.mkdir()
    whole = count(job.start(straight), straight)
    assert answered(whole) == CONVERSATIONS
    torn = [n for n, p in enumerate(whole.points, start=1) if p.what == "torn write"]
    assert len(torn) == 1 + CONVERSATIONS + 1, "the header, the conversations, the file itself"
    kept: list[bytes] = []
    # Within the second conversation's line; behind the third's, which is written and not flushed;
    # before the part file of a file in place is dropped. A resumed run has two points of its own,
    # of the truncation, and lacks the header's three and the five of each finished conversation.
    dropping = max(n for n, p in enumerate(whole.points, 1) if p.what == "before unlink")
    for at in (torn[2], 2 + 5 + 3, 2 + dropping - 3 - 3 * 5):
        died = run_until_killed(job.start(root), root, KillAt(point=at))
        assert died.killed
        before, kept = kept, finished(root)
        assert kept[: len(before)] == before, "what was finished stays"
        assert len(kept) <= len(before) + answered(died) + 1
        job.check(root)
    assert len(kept) == CONVERSATIONS
    done = count(job.start(root), root)
    assert answered(done) == 0, "nothing finished is answered again"
    assert job.outcome(root) == job.outcome(straight)
    assert not part(root).exists()
