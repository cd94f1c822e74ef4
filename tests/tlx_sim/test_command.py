"""The command of the long runs."""

import pytest

pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

from gemattn.testing.tlx_sim import __main__ as command


def test_all_is_clauses_on_both_chips_then_schedules_then_mutants(monkeypatch, capsys):
    ran = []

    def note(name, result):
        monkeypatch.setattr(command, name, lambda arguments: ran.append((name, arguments)) or result)

    monkeypatch.setattr(command, "conformance", lambda words: ran.append(("conformance", words)) or 0)
    note("seeds", True), note("mutants", True)
    assert command.main(["all"]) == 0
    assert [name for name, _ in ran] == ["conformance", "conformance", "seeds", "mutants"]
    assert [words[3] for _, words in ran[:2]] == ["sm_90", "sm_100"]
    assert ran[2][1].seeds == 50 and ran[3][1].schedules == 50 and set(ran[3][1].sources) == set(command.FILES)
    for failing in ("seeds", "mutants"):
        note(failing, False)
        assert command.main(["all"]) == 1
        note(failing, True)
    monkeypatch.setattr(command, "conformance", lambda words: 1)
    assert command.main(["all"]) == 1
    assert "all, commit" in capsys.readouterr().out


def test_seeds_tells_what_each_scenario_gave(capsys):
    assert command.main(["seeds", "--seeds", "1", "--scenario", "blackwell forward, shared"]) == 0
    assert "blackwell forward, shared query: 1 seeds, 0 bad" in capsys.readouterr().out
