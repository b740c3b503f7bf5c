"""What findings do, and that alerts reach a real HTTP server."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

import trainprobe
from trainprobe.engine.core.records import Finding, Place
from trainprobe.errors import StopTraining
from trainprobe.monitor.findings import Alerts, decide
from trainprobe.monitor.plan import Actions, make_rules


def finding(rule="spike", severity="warning"):
    return Finding(rule, severity, "a jump", 7, Place(1, 2), measured=float("nan"))


def rules(*actions):
    return make_rules({"spike": {"actions": list(actions)}})


def test_a_rule_that_only_logs_asks_for_nothing():
    decision, dumps = decide([finding()], rules("log"), Actions())
    assert (decision.dump_steps, decision.stop, dumps) == (0, None, 0)


def test_a_rule_that_dumps_asks_for_the_next_steps_until_the_limit_is_reached():
    actions, dumps, asked = Actions(dump_steps=2, dump_limit=2), 0, []
    for _ in range(3):
        decision, dumps = decide([finding()], rules("log", "dump"), actions, dumps)
        asked.append(decision.dump_steps)
    assert asked == [2, 2, 0]


def test_a_rule_that_stops_gives_the_exception_with_rule_step_and_reason():
    decision, _ = decide([finding()], rules("stop"), Actions())
    assert isinstance(decision.stop, StopTraining)
    assert str(decision.stop) == "rule 'spike' at step 7: a jump"


def test_a_note_never_dumps_or_stops():
    decision, _ = decide([finding(severity="info")], rules("stop", "dump"), Actions())
    assert (decision.dump_steps, decision.stop) == (0, None)


@pytest.fixture
def server():
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}/", got
    listening.shutdown()


def test_a_webhook_gets_the_finding_as_json_with_run_host_and_folder(server, tmp_path):
    url, got = server
    folder, host = tmp_path / "run7", socket.gethostname()
    Alerts(rules("alert"), Actions(webhook=url, console=False), folder).findings([finding()])
    assert got[0]["text"] == f"trainprobe: run7 on {host}: warning spike (step 7, rank 1): a jump ({folder})"
    assert (got[0]["run"], got[0]["host"], got[0]["folder"]) == ("run7", host, str(folder))
    assert (got[0]["rule"], got[0]["place"]["rank"], got[0]["measured"]) == ("spike", 1, None)


def test_findings_of_rules_that_do_not_alert_are_not_sent(server):
    url, got = server
    Alerts(rules("log"), Actions(webhook=url, console=False), Path()).findings([finding(), finding("dead")])
    assert got == []


def test_a_webhook_that_does_not_answer_is_complained_about_once():
    alerts = Alerts(rules("alert"), Actions(webhook="http://127.0.0.1:9/", console=False, webhook_timeout=1), Path())
    alerts.findings([finding(), finding()])
    assert [f.rule for f in alerts.warnings_made()] == ["alerts"]
    alerts.findings([finding()])
    assert alerts.warnings_made() == []


def test_the_callback_gets_the_alert_and_the_console_prints_it_once(capsys, tmp_path):
    got = []
    monitor = {"rules": {"spike": {"actions": ["alert"]}}, "actions": {"callback": got.append}}
    with trainprobe.Probe({"output": tmp_path, "level": "off", "monitor": monitor}) as probe:
        probe.open(torch.nn.Linear(2, 2))
        probe.report(finding())
        probe.flush()
        assert capsys.readouterr().err == "trainprobe: warning spike (step 7, rank 1): a jump\n"
    assert [f.rule for f in got] == ["spike"]


def test_the_console_can_be_silent_about_the_rules(capsys, tmp_path):
    with trainprobe.Probe({"output": tmp_path, "level": "off", "monitor": {"actions": {"console": False}}}) as probe:
        probe.open(torch.nn.Linear(2, 2))
        probe.report(finding())
    assert capsys.readouterr().err == ""
