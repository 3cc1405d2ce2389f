"""Teacher first, each unit once, also across a kill."""

import os
import signal
from pathlib import Path

import pytest
import torch

from attn2mamba.errors import UserError
from attn2mamba.evaluate.measure import Measure, Subject
from attn2mamba.evaluate.results import Results
from attn2mamba.evaluate.runner import Candidate, evaluate
from attn2mamba.progress import Steps

VALUES = {"teacher": 1.0, "student": 0.5}


class Probe(Measure):
    """Notes every unit that it runs in a file; dies at unit `fatal`."""

    def __init__(self, log: Path, name: str = "probe", fatal: str = "", option: int = 0, problem: str | None = None):
        self.log, self.name, self.fatal, self.option, self.problem = log, name, fatal, option, problem
        self.learned: list[str] = []

    def options(self):
        return {"option": self.option}

    def units(self, subject):
        return ["a", "b", "c", "d"]

    def run(self, subject, unit):
        if unit == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.log.open("a") as file:
            file.write(f"{subject.role} {self.name} {unit}\n")
        return {"scores": {"value": [VALUES[subject.role], VALUES[subject.role] + (unit == "a") / 8]}}

    def learn_from(self, teacher):
        self.learned = list(teacher)

    def complaint(self, figures):
        return self.problem


def candidates(*roles: str) -> list[Candidate]:
    model = torch.nn.Linear(2, 2)
    return [Candidate(r, lambda r=r: Subject(r, f"my {r}", model, None, "fp32", f"print of {r}")) for r in roles]


def run(directory: Path, *measures: Measure, roles=("student", "teacher"), gates=(), fresh=False):
    return evaluate(candidates(*roles), measures, Results(directory / "kept", fresh), Steps(), "the command", gates)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log"
    path.touch()
    return path


def test_teacher_first_and_side_by_side(tmp_path, log):
    measure = Probe(log)
    report = run(tmp_path, measure)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["teacher"] * 4 + ["student"] * 4
    assert measure.learned == ["a", "b", "c", "d"]
    found = report["measures"]["probe"]
    assert found["command"] == "the command" and found["options"] == {"option": 0}
    assert found["figures"]["teacher"]["value"] == {"value": 1.015625, "n": 8, "stderr": pytest.approx(0.015625)}
    difference = found["differences"]["student"]["value"]
    assert (difference["difference"], difference["n"], difference["verdict"]) == (-0.5, 8, "differs")
    assert report["models"]["student"] == {
        "name": "my student", "fingerprint": "print of student", "precision": "fp32", "parameters": 6,
        "other_tokenizer": None,
    }  # fmt: skip


def test_without_a_teacher_there_are_no_differences(tmp_path, log):
    found = run(tmp_path, Probe(log), roles=["student"])["measures"]["probe"]
    assert found["differences"] == {} and found["figures"]["student"]["value"]["n"] == 8


def test_nothing_is_run_twice(tmp_path, log):
    first = run(tmp_path, Probe(log))
    assert run(tmp_path, Probe(log)) == first
    assert len(log.read_text().splitlines()) == 8
    run(tmp_path, Probe(log, option=1))
    assert len(log.read_text().splitlines()) == 16
    run(tmp_path, Probe(log), fresh=True)
    assert len(log.read_text().splitlines()) == 24


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path, log):
    process = os.fork()
    if not process:
        try:
            run(tmp_path, Probe(log, "first"), Probe(log, "second", fatal="c"))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    done = log.read_text().splitlines()
    assert done == [*(f"teacher first {u}" for u in "abcd"), "teacher second a", "teacher second b"]
    report = run(tmp_path, Probe(log, "first"), Probe(log, "second"))
    later = log.read_text().splitlines()[len(done) :]
    assert later[:2] == ["teacher second c", "teacher second d"] and len(later) == 10
    whole = run(tmp_path / "other", Probe(log, "first"), Probe(log, "second"))
    assert report == whole


def test_a_teacher_that_cannot_be_right_stops_everything(tmp_path, log):
    with pytest.raises(UserError, match=r"the teacher's probe cannot be right: upside down; no model was compared"):
        run(tmp_path, Probe(log, problem="upside down"))
    assert "student" not in log.read_text()


def test_gates_come_first_and_are_the_teachers_alone(tmp_path, log):
    report = run(tmp_path, Probe(log), gates=[Probe(log, "gate")])
    lines = [line.rsplit(" ", 1)[0] for line in log.read_text().splitlines()]
    assert lines == ["teacher gate"] * 4 + ["teacher probe"] * 4 + ["student probe"] * 4
    assert list(report["gate"]) == ["gate"] and list(report["measures"]) == ["probe"]
    with pytest.raises(UserError, match="the teacher's gate cannot be right"):
        run(tmp_path, Probe(log), gates=[Probe(log, "gate", problem="no")])
    lines = log.read_text().splitlines()
    run(tmp_path, Probe(log), roles=["student"], gates=[Probe(log, "gate", problem="no")])
    assert log.read_text().splitlines() == lines
