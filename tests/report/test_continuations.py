"""What the models write, in page and document."""

import json

from attn2mamba.report import write_report

from .made_up import make_run, write

CARD = {"prompt": "The <capital> of", "continuation": {"teacher": " Paris.", "student": " <b>Rome\n& more"}}


def test_texts_stand_side_by_side(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    write(runs[0] / "scorecard.json", CARD)
    page = write_report(runs[:1]).read_text()
    found = json.loads((runs[0] / "report.json").read_text())["runs"][0]["continuations"]
    assert (
        found["texts"] == CARD["continuation"] and found["prompt"] == CARD["prompt"] and found["decoding"] == "greedy"
    )
    assert found["command"].startswith("attn2mamba distill") and found["n"] == 1
    assert "<q>The &lt;capital&gt; of</q>" in page and "<blockquote> &lt;b&gt;Rome\n&amp; more</blockquote>" in page
    assert "greedy" in page[page.index("What they write") :][:200]
    write(runs[1] / "scorecard.json", CARD)
    page = write_report(runs).read_text()
    assert page.count("What they write") == 1 and page.count("<blockquote>") == 3  # the teacher's stands there once


def test_without_texts_the_part_is_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    assert "What they write" not in write_report([run]).read_text()
    write(run / "scorecard.json", {"prompt": "x", "continuation": 3})
    assert "What they write" not in write_report([run]).read_text()
    assert json.loads((run / "report.json").read_text())["runs"][0]["continuations"] is None
