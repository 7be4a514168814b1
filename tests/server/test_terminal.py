"""Goal: a conversation in a terminal goes on whatever happens. Method: a real terminal, a scripted engine."""

import subprocess
import sys

from tests.server.scripted import ScriptedService, served
from tests.terminal import CONTROL_C, Terminal

UP, CONTROL_D = b"\x1b[A", b"\x04"


def test_lines_are_remembered_and_edited_and_errors_end_nothing(tmp_path):
    service = ScriptedService()
    with served(service) as url:
        with Terminal("chat", "--url", url, home=tmp_path) as terminal:
            assert "can not be said" in terminal.type("impossible", "can not be said")
            terminal.type("Hellx\x7fo", "tokens cached")
            terminal.press(UP)
            terminal.type("!", "tokens cached")
            assert "/nonsense is not a command" in terminal.type("/nonsense", "not a command")
            terminal.type("/save /nowhere/file", "No such file")
            terminal.type("/help", "/explain")
            terminal.press(b"half a line")
            terminal.read("half a line")
            terminal.interrupt()
            terminal.type("/reset")
            terminal.type("/explain", "nothing was answered")
            terminal.press(CONTROL_D)
        assert terminal.code == 0
        with Terminal("chat", "--url", url, home=tmp_path) as terminal:
            terminal.press(UP * 2)
            terminal.type("")
            terminal.press(CONTROL_D)
        said = [service.text.decode(ask.prompt) for ask in service.asks]
    answer = "assistant:Hello world!\n"
    assert said == [
        "user:Hello\nassistant:",
        f"user:Hello\n{answer}user:Hello!\nassistant:",
    ]
    assert (tmp_path / "tiercel" / "chat_history").stat().st_mode & 0o777 == 0o600


def test_an_answer_is_stopped_by_control_c_and_the_conversation_goes_on(tmp_path):
    service = ScriptedService(hold_after=1)
    with served(service) as url, Terminal("chat", "--url", url, home=tmp_path) as terminal:
        terminal.press(b"Hi\r")
        terminal.read("Hello")
        terminal.press(CONTROL_C)
        terminal.read("stopped")
        terminal.read("> ")
        terminal.press(b"/exit\r")
    assert terminal.code == 0


def test_a_script_is_told_by_the_exit_code_and_goes_on_too():
    with served(ScriptedService()) as url:
        command = [sys.executable, "-m", "tiercel.cli", "chat", "--url", url]
        text = "impossible\nHello\n"
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "can not be said" in done.stderr and "Hello world!" in done.stdout
