"""report.html and report.json as a whole: from made-up runs to files, and what the command says of mistakes."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from attn2mamba.errors import UserError
from attn2mamba.report import page, write_report

from .made_up import make_bench, make_evaluation, make_run


def read(page: Path) -> tuple[str, dict]:
    return page.read_text(), json.loads(page.with_name("report.json").read_text())


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> tuple[str, dict]:
    """Page and document of a run with everything."""
    run = make_run(tmp_path_factory.mktemp("runs") / "complete", make_evaluation(), make_bench())
    return read(write_report([run]))


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> tuple[str, dict]:
    """Page and document of three runs: complete, without evaluation, unfinished and of a hostile name."""
    root = tmp_path_factory.mktemp("runs")
    runs = [
        make_run(root / "first", make_evaluation(recall=0.2), make_bench()),
        make_run(root / "second"),
        make_run(root / "<script>alert('&')", finished=False),
    ]
    return read(write_report(runs, root / "new" / "report"))


def numbers(value) -> list[dict]:
    """Every figure of the document."""
    if isinstance(value, dict):
        below = [n for item in value.values() for n in numbers(item)]
        return [value, *below] if "measured" in value and "unit" in value else below
    return [n for item in value for n in numbers(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("pages", ["complete", "several"])
def test_every_figure_says_n_precision_and_command(pages, request):
    _, document = request.getfixturevalue(pages)
    found = numbers(document)
    assert len(found) > 30
    for number in found:
        assert number["command"].startswith("attn2mamba "), number
        if number["measured"]:
            assert number["n"] >= 1 and number["of"] and number["precision"], number
        else:
            assert number["value"] is None and number["text"] == "not measured", number
    for run in document["runs"]:
        for part in [*run["training"]["stages"], *(x for x in run["layers"].values() if x)]:
            assert part["n"] >= 1 and part["precision"] and part["command"].startswith("attn2mamba ")


def test_cells_say_where_they_come_from(complete):
    _, document = complete
    cells = document["runs"][0]["cells"]
    assert {"needle", "copying", "positions", "repetition", "json"} <= set(cells)
    for part in cells.values():
        assert part["command"].startswith("attn2mamba eval") and part["precision"] == dict.fromkeys(
            part["by_role"], "fp32"
        )
        assert all(cell["n"] >= 1 for rows in part["by_role"].values() for cell in rows)


class Elements(HTMLParser):
    """Tags that were opened and not closed, ids, and everything that could be fetched."""

    VOID = ("meta", "br", "wbr", "link", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.ids, self.fetched, self.used = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "data", "action") and not value.startswith("#"):
                self.fetched.append(value)
            self.used += re.findall(r"url\(#(.+?)\)", value or "") + ([value[1:]] if name == "href" else [])
        if tag in ("script", "link", "iframe", "object"):
            self.fetched.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("pages", ["complete", "several"])
def test_page_is_whole_and_fetches_nothing(pages, request):
    page, _ = request.getfixturevalue(pages)
    assert "http:" not in page and "https:" not in page and "@import" not in page and "@font-face" not in page
    elements = Elements(page)
    assert not elements.open and not elements.fetched
    assert len(elements.ids) == len(set(elements.ids)) and set(elements.used) <= set(elements.ids)
    assert len(page) < 3_000_000


def test_names_are_escaped(several):
    page, document = several
    assert "<script" not in page and "&lt;script&gt;alert(&#39;&amp;&#39;)" in page
    assert document["runs"][2]["name"] == "<script>alert('&')"


def test_runs_stand_side_by_side(several):
    page, document = several
    assert [run["name"] for run in document["runs"]][:2] == ["first", "second"]
    header = re.search(r"<thead><tr>(.*?)</tr>", page)[1]
    assert [re.sub("<.*?>", "", cell) for cell in header.split("</th>")][1:3] == ["first", "second"]
    legend = re.search(r'<ul class="legend">(.*?)</ul>', page, re.S)[1]
    assert "first" in legend and "second" in legend
    assert page.count("not measured") >= 3


def test_an_unfinished_run_says_so(several):
    page, document = several
    problem = document["runs"][2]["problems"][-1]
    assert "not finished" in problem and "step 2 of 4 of stage 1 (finetune)" in problem and "--resume" in problem
    assert "not finished" in page
    card = document["runs"][2]["scorecard"]
    assert not card["perplexity_ratio"]["measured"] and not card["memory_at_32k"]["measured"]


def test_numbers_of_page_and_document_agree(complete):
    page, document = complete
    for number in document["runs"][0]["scorecard"].values():
        if number["unit"] != "bytes" or number["n"]:
            assert number["text"] in page or number["unit"] in ("bytes", "x")
    assert document["runs"][0]["verdict"].split("(")[0] in page


def test_the_same_files_give_the_same_page(tmp_path):
    run = make_run(tmp_path / "run")
    pages = [write_report([run]).read_text() for _ in range(2)]
    assert pages[0] == pages[1]


def test_the_commands_are_those_of_all_figures_that_are_known(complete):
    page, document = complete
    end = page[page.index("Every number above") :]
    shown = set(re.findall("<code>(.*?)</code>", end))
    needed = {n["command"] for n in numbers(document) if n["measured"]}
    assert all(part in shown for command in needed for part in command.split("; "))
    assert document["command"] in shown and document["runs"][0]["commands"]["bench"] not in shown


def test_commands_that_one_figure_joins_stand_by_themselves():
    figure = {"measured": True, "command": "a; b"}
    run = {"commands": {"distill": "d"}, "x": [figure, {"command": "a"}, {"command": "b"}]}
    run["y"] = {"measured": False, "command": "c"}
    assert page.commands_of({"command": "r", "runs": [run]}) == ["d", "a", "b", "r"]
    run["x"].pop()
    assert page.commands_of({"command": "r", "runs": [run]}) == ["d", "a; b", "a", "r"]


def test_the_command_is_what_was_asked(tmp_path):
    run = make_run(tmp_path / "run")
    _, document = read(write_report([run], tmp_path / "my report"))
    assert document["command"] == f"attn2mamba report {run} --output '{tmp_path}/my report'"
    assert document["runs"][0]["layers"]["gate"]["command"] == f"attn2mamba report {run}"


def test_names_break_at_their_joints_alone(complete):
    page_text, _ = complete
    assert "greedy_<wbr>loop" in page_text and "likelihood@<wbr>1024" in page_text
    assert str(page.breakable("<a_b>")) == "&lt;a_<wbr>b&gt;"
    style = re.search("<style>(.*?)</style>", page_text, re.S)[1]
    assert not re.search(r"th:first-child \{[^}]*overflow-wrap: anywhere", style)


def test_hedgehog_is_explained_where_models_stand(tmp_path):
    evaluation = make_evaluation()
    evaluation["models"]["hedgehog"] = evaluation["models"]["student"]
    figures = evaluation["measures"]["wikitext2"]["figures"]
    figures["hedgehog"] = figures["student"]
    text, _ = read(write_report([make_run(tmp_path / "run", evaluation)]))
    assert "hedgehog<small>the model after stage 1 (linear attention)</small>" in text
    assert "hedgehog is the model after stage 1 (linear attention), student the finished one." in text


def test_held_out_losses_say_their_real_n(tmp_path):
    run = make_run(tmp_path / "run")
    text, _ = read(write_report([run]))
    assert "n = 60 held-out tokens" in text and "n = 64 held-out tokens" in text  # 4 blocks of 16; 1 of each unscored
    (run / "figures.json").unlink()
    text, _ = read(write_report([run]))
    assert "n = 64 held-out tokens at most" in text


def test_mistakes(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"gone is not a run of attn2mamba \(no recipe.yaml\)"):
        write_report([run, tmp_path / "gone"], tmp_path / "out")
    with pytest.raises(UserError, match="given twice"):
        write_report([run, tmp_path / "run" / ".." / "run"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_report([run], tmp_path / "file")
    (run / "recipe.yaml").write_text("stages: 3")
    with pytest.raises(UserError, match="is not a recipe that this version reads"):
        write_report([run])


def test_the_command(cli, tmp_path):
    code, out, _ = cli("report", make_run(tmp_path / "run", finished=False), "--output", tmp_path / "out")
    assert code == 0 and out == f"{tmp_path}/out/report.html\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report.json"}
    code, out, err = cli("report", tmp_path / "out")
    assert (code, out) == (2, "") and err.startswith("attn2mamba: ") and err.count("\n") == 1
