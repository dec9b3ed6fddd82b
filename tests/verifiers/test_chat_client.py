import asyncio
import pickle
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from apportion.verifiers import InputError
from apportion.verifiers.chat_client import Ask, ChatError, ask_all
from apportion.verifiers.endpoint import Endpoint

pytest.importorskip("openai")

UNSET = "api_key_env: the environment variable OPENAI_API_KEY is not set; "
KEY = "sk-no-such-secret-4711"


def endpoint(server, **options):
    return Endpoint("little-judge", server.url, **{"retries": 0, "timeout_s": 5.0, **options})


def whole(reply):
    return int(reply) if reply.isdecimal() else None


def question(text="1+1?", number=0):
    return Ask((("system", "Count."), ("user", text)), whole, "Only the number.", number)


def questions(count):
    return [question(f"<{place}>") for place in range(count)]


@pytest.fixture
def pauses(monkeypatch):
    """Seconds that the client library wanted to wait, without the waiting."""
    wanted = []

    async def sleep(seconds):
        wanted.append(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    return wanted


def test_answers_come_in_the_order_of_the_questions(chat_server):
    chat_server.script = lambda body, number: chat_server.say(body["messages"][1]["content"].strip("<>"))
    assert ask_all(endpoint(chat_server), questions(20)) == list(range(20))
    assert ask_all(endpoint(chat_server), []) == []


def test_what_is_sent_is_what_the_options_say(chat_server):
    chat_server.in_order("2")
    asked = endpoint(chat_server, temperature=0.5, max_tokens=9, seed=40, extra_body={"top_k": 3})
    assert ask_all(asked, [question(number=2)]) == [2]
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1?"}]
    sent = {"model": "little-judge", "messages": messages, "temperature": 0.5, "max_tokens": 9, "seed": 42, "top_k": 3}
    assert chat_server.requests == [sent]
    ask_all(endpoint(chat_server, temperature=None, max_tokens=None), [question()])
    assert chat_server.requests[1] == {"model": "little-judge", "messages": messages}


def test_no_more_questions_are_under_way_than_allowed_and_no_fewer(chat_server):
    chat_server.in_order("1")
    chat_server.meeting = threading.Barrier(4)  # opens only where four are there at once
    assert ask_all(endpoint(chat_server, concurrency=4), questions(16)) == [1] * 16
    assert (chat_server.most_at_once, chat_server.meeting.broken) == (4, False)


def test_the_same_question_is_asked_once(chat_server):
    chat_server.script = lambda body, number: chat_server.say(str(number))
    answers = ask_all(endpoint(chat_server, concurrency=1), [question(), question(), question(number=1), question()])
    assert (answers, len(chat_server.requests)) == ([0, 0, 1, 0], 2)


def test_a_busy_server_is_asked_again_when_it_says(chat_server, pauses):
    busy = chat_server.fail(429, Retry_After="7")
    chat_server.in_order(busy, chat_server.fail(503, Retry_After_Ms="20"), "2")
    assert ask_all(endpoint(chat_server, retries=2), [question()]) == [2]
    assert pauses == [7.0, 0.02]


def test_a_broken_server_is_asked_again_after_growing_pauses(chat_server, pauses):
    chat_server.in_order(*[chat_server.fail(500)] * 2, chat_server.Answer(b'{"choi', missing=20), "2")
    assert ask_all(endpoint(chat_server, retries=3), [question()]) == [2]
    assert [low * 0.75 <= pause <= low for pause, low in zip(pauses, (0.5, 1.0, 2.0), strict=True)] == [True] * 3


def test_a_fault_that_lasts_is_the_fault_of_its_question_alone(chat_server, pauses):
    chat_server.by_text(
        {"<0>": chat_server.fail(500, "out\nof order"), "<1>": "1", "<2>": chat_server.fail(400, "long"), "": "3"}
    )
    first, second, third, fourth = ask_all(endpoint(chat_server, retries=2), questions(4))
    assert (second, fourth) == (1, 3)
    assert isinstance(first, ChatError)
    assert isinstance(third, ChatError)
    host = chat_server.url.split("/")[2]
    assert str(first).startswith(f"{host}: status 500")
    assert "out of order" in str(first)
    assert str(first).endswith("(2 retries)")
    assert str(third).startswith(f"{host}: status 400")
    assert len(chat_server.requests) == 6  # a question that is at fault itself is not asked again


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_server_that_hangs_or_trickles_is_given_up(chat_server, where):
    stuck = chat_server.Answer(b" " * 10_000, hangs=where)
    chat_server.by_text({"<0>": stuck, "<1>": "1"})
    first, second = ask_all(endpoint(chat_server, timeout_s=0.2), questions(2))
    assert (str(first), second) == (f"{chat_server.url.split('/')[2]}: no answer within 0.2 s", 1)


def test_nobody_there_is_a_fault(chat_server):
    nowhere = Endpoint("m", "http://127.0.0.1:1/v1", retries=0)
    (answer,) = ask_all(nowhere, [question()])
    assert str(answer).startswith("127.0.0.1:1: cannot be reached")


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"{", b"", b"[]", b"null", b"{}", b'{"choices": null}', b'{"choices": []}', b'{"choices": [{}]}'],
)
def test_what_is_no_chat_completion_is_a_fault_if_it_comes_twice(chat_server, body):
    chat_server.in_order(chat_server.Answer(body), "2")
    assert ask_all(endpoint(chat_server), [question()]) == [2]
    chat_server.in_order(chat_server.Answer(body))
    (answer,) = ask_all(endpoint(chat_server), [question()])
    assert isinstance(answer, ChatError)
    assert str(answer).endswith("what the server sends is no chat completion")


def test_a_reply_of_no_use_is_asked_for_once_more_with_a_reminder(chat_server):
    chat_server.in_order("two", "2")
    stats = Counter()
    assert ask_all(endpoint(chat_server), [question()], stats) == [2]
    said = [(message["role"], message["content"]) for message in chat_server.requests[1]["messages"]]
    assert said[2:] == [("assistant", "two"), ("user", "Only the number.")]
    assert stats == {"calls": 2, "unusable": 1, "prompt_tokens": 10, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("text", "finish"), [("two", "stop"), ("2", "length"), ("2", "content_filter"), (None, "stop"), (["2"], "stop")]
)
def test_no_usable_reply_is_none_and_no_fault(chat_server, tmp_path, text, finish):
    chat_server.in_order(chat_server.say(text, finish))
    for reasks in (0, 1, 2):
        assert ask_all(endpoint(chat_server, reasks=reasks, cache=str(tmp_path / "c")), [question()]) == [None]
    assert len(chat_server.requests) == 6  # and nothing of it is kept


def test_a_server_that_does_not_say_why_it_ended_is_believed(chat_server):
    chat_server.in_order(chat_server.say("2", None, usage=None))
    assert ask_all(endpoint(chat_server), [question()]) == [2]


def test_a_reply_is_paid_for_once(chat_server, tmp_path):
    chat_server.script = lambda body, number: chat_server.say(str(number))
    kept = endpoint(chat_server, cache=str(tmp_path / "new" / "replies.sqlite"), concurrency=1)
    stats = Counter()
    assert ask_all(kept, questions(3), stats) == [0, 1, 2]
    assert ask_all(kept, questions(4)[::-1], stats) == [3, 2, 1, 0]
    assert (stats["calls"], stats["cached"]) == (4, 3)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.1}, {"max_tokens": 8}, {"seed": 1}, {"extra_body": {"top_k": 1}}, {"model": "other"}]
)
def test_a_reply_is_kept_for_its_model_and_options(chat_server, tmp_path, change):
    chat_server.script = lambda body, number: chat_server.say(str(number))
    options = {"model": "m", "base_url": chat_server.url, "cache": str(tmp_path / "c")}
    assert ask_all(Endpoint(**options), [question(), question()]) == [0, 0]
    assert ask_all(Endpoint(**options | change), [question()]) == [1]
    assert ask_all(Endpoint(**options), [question()]) == [0]
    assert ask_all(Endpoint(**options), [question(number=1)]) == [2]


def test_a_kept_reply_that_can_no_longer_be_read_is_asked_for_anew(chat_server, tmp_path):
    chat_server.in_order("1", "22", "333")
    kept = endpoint(chat_server, cache=str(tmp_path / "c"))
    assert ask_all(kept, [question()]) == [1]
    stricter = Ask(question().messages, lambda reply: len(reply) if len(reply) > 1 else None, "")
    assert [ask_all(kept, [stricter]) for _ in range(2)] == [[2], [2]]


def test_a_file_that_is_no_cache_is_named_before_anything_is_asked(chat_server, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("some notes" * 100)
    with pytest.raises(InputError, match=r"cache: .*notes.txt cannot be used .*; give another path"):
        ask_all(endpoint(chat_server, cache=str(path)), [question()])
    assert (chat_server.requests, path.read_text()) == ([], "some notes" * 100)


ASKING = """
import sys
from apportion.verifiers.chat_client import Ask, ask_all
from apportion.verifiers.endpoint import Endpoint
url, cache, first = sys.argv[1:]
asks = [Ask((("user", str(place)),), str, "") for place in range(int(first), int(first) + 40)]
assert ask_all(Endpoint("m", url, cache=cache, retries=0), asks) == ["1"] * 40
"""


def test_several_processes_share_a_cache(chat_server, tmp_path):
    chat_server.in_order("1")
    cache = str(tmp_path / "c")
    asking = [subprocess.Popen([sys.executable, "-c", ASKING, chat_server.url, cache, first]) for first in ("0", "20")]
    assert [process.wait(timeout=60) for process in asking] == [0, 0]
    connection = sqlite3.connect(cache)
    assert connection.execute("SELECT count(*), min(reply), max(reply) FROM replies").fetchall() == [(60, "1", "1")]
    connection.close()


def test_lone_surrogates_are_asked_about_and_kept(chat_server, tmp_path):
    chat_server.in_order("2 \ud800")
    kept = endpoint(chat_server, cache=str(tmp_path / "c"))
    ask = Ask((("user", "\udcff 📷"),), lambda reply: reply, "")
    assert [ask_all(kept, [ask]) for _ in range(2)] == [["2 ?"], ["2 ?"]]
    assert [request["messages"][0]["content"] for request in chat_server.requests] == ["? 📷"]


def test_it_works_within_a_running_loop_and_in_threads(chat_server):
    chat_server.in_order("2")
    asked = endpoint(chat_server)

    async def notebook():
        return ask_all(asked, [question()])

    assert asyncio.run(notebook()) == [2]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: ask_all(asked, questions(n + 1)), range(4))) == [[2] * (n + 1) for n in range(4)]


def test_the_only_model_of_a_server_needs_no_name(chat_server):
    chat_server.in_order("2")
    unnamed = Endpoint(None, chat_server.url, retries=0)
    assert ask_all(unnamed, [question()]) == [2]
    assert chat_server.requests[0]["model"] == "little-judge"
    chat_server.models = ["a", "b"]
    host = chat_server.url.split("/")[2]
    assert [str(answer) for answer in ask_all(unnamed, questions(2))] == [
        f"model: {host} offers a, b; give the name of one"
    ] * 2
    (nobody,) = ask_all(Endpoint(None, "http://127.0.0.1:1/v1", retries=0), [question()])
    assert str(nobody).startswith("127.0.0.1:1: cannot be reached")


def test_the_key_goes_to_the_server_and_nowhere_else(chat_server, tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    chat_server.by_text(
        {"<0>": chat_server.fail(401, f"bad key {KEY}"), "<1>": f"you sent {KEY}", "": chat_server.Answer(KEY.encode())}
    )
    asked = endpoint(chat_server, api_key_env="JUDGE_KEY", cache=str(tmp_path / "c"))
    asks = [Ask(ask.messages, lambda reply: reply, "") for ask in questions(3)]
    told = ask_all(asked, asks)
    assert {header["authorization"] for header in chat_server.headers} == {f"Bearer {KEY}"}
    assert told[1] == "you sent ***"
    assert "bad key ***" in str(told[0])
    seen = [repr(asked), pickle.dumps(asked), repr(told), pickle.dumps(told), caplog.text]
    seen += [path.read_bytes() for path in tmp_path.iterdir()]
    assert not any((KEY if isinstance(text, str) else KEY.encode()) in text for text in seen)
    assert [(fault.__cause__, fault.__context__) for fault in told if isinstance(fault, ChatError)] == [
        (None, None)
    ] * 2


def test_a_short_placeholder_of_a_key_leaves_replies_alone(chat_server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "2")
    chat_server.in_order("222")
    assert ask_all(endpoint(chat_server), [question()]) == [222]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": None}, UNSET + "set it to the key of api.openai.com, or give api_key_env=null"),
        ({"base_url": "http://gpu7:8000/v1"}, UNSET + "set it to the key of gpu7:8000, or"),
        ({"api_key_env": KEY}, "api_key_env: give the name of an environment variable"),
        ({"base_url": "localhost:8000"}, "base_url: 'localhost:8000' is no address"),
        ({"base_url": "http://[::1/v1"}, "base_url: 'http://[::1/v1' is no address"),
        ({"base_url": f"http://me:{KEY}@localhost/v1"}, "base_url: holds a user name or password"),
        ({"concurrency": 0}, "concurrency: 0"),
        ({"timeout_s": float("inf")}, "timeout_s: inf"),
        ({"retries": -1}, "retries: -1"),
        ({"reasks": -1}, "reasks: -1"),
        ({"extra_body": {"x": object()}}, "extra_body: cannot be sent as JSON"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(options, words):
    with pytest.raises(InputError) as refusal:
        Endpoint(**{"model": "m", "base_url": "http://localhost:8000/v1"} | options)
    assert str(refusal.value).startswith(words)
    assert KEY not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_key_that_is_none_is_not_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(InputError, match="printable ASCII") as refusal:
        Endpoint("m", "http://localhost:8000/v1")
    assert "secret" not in str(refusal.value)
    assert Endpoint("m", "http://gpu7:8000/v1", api_key_env=None).key() == ""
