"""A session against `greedy_generate` and `generate` on its whole text."""

import pytest
import torch
from test_decoding import VOCABULARY, WINDOW, make_drafter, make_prompt, make_target
from test_drafter import one_thread  # noqa: F401

from torch_dflash2 import Session, generate, greedy_generate
from torch_dflash2.decoding import Decoder


def make_session(device="cpu", seed=1, **options):
    target, drafter = make_target(seed=seed, device=device), make_drafter(device=device)
    return Session(target, drafter, block_size=4, stop_token_ids=(), **options), target, drafter


def plain(target, token_ids, tokens):
    ids = torch.tensor([token_ids], device=target.device)
    return greedy_generate(target, ids, max_new_tokens=tokens, stop_token_ids=()).token_ids


def rounds_of_a_fresh_run(target, drafter, token_ids, tokens):
    ids = torch.tensor([token_ids], device=target.device)
    result = generate(target, drafter, ids, max_new_tokens=tokens, stop_token_ids=(), block_size=4)
    return result.stats.acceptance_lengths


def assert_in_step(session):
    """The ring holds what a fresh drafter would hold of the same text."""
    decoder = session._decoder
    read = decoder.target.lengths[0]
    assert read == len(session.token_ids) - 1 and int(decoder.cache.token_counts.cpu()) == read
    fresh = decoder.drafter.make_cache()
    with torch.inference_mode():
        text = torch.tensor([session.token_ids[:read]], device=decoder.device)
        hidden = decoder.target.model(text, output_hidden_states=True).hidden_states
        decoder.drafter.prefill_context(fresh, decoder.drafter.context_features(hidden))
    newest = min(read, WINDOW - 1)
    slots = [t % WINDOW for t in range(read - newest, read)]
    for ours, theirs in zip(decoder.cache.rings, fresh.rings, strict=True):
        torch.testing.assert_close(ours[..., slots, :].cpu(), theirs[..., slots, :].cpu(), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_turns_are_those_of_a_fresh_run_on_the_whole_text(device, seed):
    session, target, drafter = make_session(device, seed)
    text = []
    for turn, (prompt_tokens, new_tokens) in enumerate([(5, 9), (1, 1), (WINDOW + 3, 14), (2, 2)]):
        prompt = make_prompt(prompt_tokens, 10 * seed + turn, device)
        text += prompt[0].tolist()
        want = plain(target, text, new_tokens)
        rounds = rounds_of_a_fresh_run(target, drafter, text, new_tokens)
        streamed = []
        result = session.generate(prompt, max_new_tokens=new_tokens, on_tokens=streamed.extend)
        text += want
        assert result.token_ids == streamed == want and session.token_ids == text
        assert result.stats.acceptance_lengths == rounds
        assert result.stats.prompt_tokens == prompt_tokens + (turn > 0)  # and the newest token of the turn before
        assert_in_step(session)


def test_a_text_goes_on_without_a_new_prompt(device):
    session, target, _ = make_session(device)
    prompt = make_prompt(6, device=device)
    want = plain(target, prompt[0].tolist(), 30)
    got = [session.generate(prompt, max_new_tokens=7)]
    got += [session.generate(max_new_tokens=n) for n in (1, 2, 13, 7)]
    assert sum((result.token_ids for result in got), []) == want
    assert_in_step(session)


@pytest.mark.parametrize("keep", [0, 1, 2, 7, 8, 9, 20, 39, 40])
def test_rewind(device, keep):
    session, target, drafter = make_session(device)
    session.generate(make_prompt(8, 3, device), max_new_tokens=32)
    whole = list(session.token_ids)
    session.rewind(keep)
    assert session.token_ids == whole[:keep]
    turn = make_prompt(3, 4, device)
    text = whole[:keep] + turn[0].tolist()
    rounds = rounds_of_a_fresh_run(target, drafter, text, 12)
    result = session.generate(turn, max_new_tokens=12)
    assert result.token_ids == plain(target, text, 12)
    assert result.stats.acceptance_lengths == rounds
    assert_in_step(session)


def test_rewind_and_go_on_gives_the_same_again(device):
    session, *_ = make_session(device)
    session.generate(make_prompt(8, 3, device), max_new_tokens=32)
    whole = list(session.token_ids)
    session.rewind(21)
    session.generate(max_new_tokens=19)
    assert session.token_ids == whole


def test_forks_go_on_by_themselves(device):
    session, target, _ = make_session(device)
    session.generate(make_prompt(8, 5, device), max_new_tokens=10)
    whole = list(session.token_ids)
    forks = [session.fork() for _ in range(2)]
    turns = [make_prompt(n, n, device) for n in (3, 5, 4)]
    for each, turn in zip((session, *forks), turns, strict=True):
        text = whole + turn[0].tolist()
        assert each.generate(turn, max_new_tokens=15).token_ids == plain(target, text, 15)
    forks[0].rewind(9)
    for each in (session, *forks):
        text = list(each.token_ids)
        assert each.generate(max_new_tokens=6).token_ids == plain(target, text, 6)
        assert_in_step(each)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize(
    "where,call",
    [("prefill_context", 1)]  # a turn is read in one piece
    + [(where, call) for where in ("target", "context_features", "commit_context", "on_tokens", "keep") for call in (1, 2, 4)],
)
def test_whatever_fails_the_next_call_is_right(device, monkeypatch, where, call):
    session, target, drafter = make_session(device)
    session.generate(make_prompt(WINDOW + 4, 6, device), max_new_tokens=10)
    before = list(session.token_ids)
    calls = []

    def failing(inner, late):
        def run(*args, **kwargs):
            calls.append(1)
            if len(calls) == call and not late:
                raise Interrupted
            result = inner(*args, **kwargs)
            if len(calls) == call:
                raise Interrupted
            return result

        return run

    streamed = []
    on_tokens = streamed.extend
    late = call % 2 == 0  # after the work was done, else before
    if where == "on_tokens":
        on_tokens = failing(on_tokens, late)
    else:
        owner = {"target": target, "keep": session._decoder.target}.get(where, drafter)
        name = "forward" if where == "target" else where
        replacement = failing(getattr(owner, name), late)
        if where == "target":
            replacement.__signature__ = __import__("inspect").signature(target.forward)
        monkeypatch.setattr(owner, name, replacement)
    turn = make_prompt(5, 7, device)
    with pytest.raises(Interrupted):
        session.generate(turn, max_new_tokens=20, on_tokens=on_tokens)
    monkeypatch.undo()
    # What was certain is in the text, and it is the text's own continuation.
    text = before + turn[0].tolist()
    want = text + plain(target, text, 20)
    assert session.token_ids == want[: len(session.token_ids)] and len(session.token_ids) >= len(text)
    assert streamed == want[len(text) :][: len(streamed)]
    missing = len(want) - len(session.token_ids)
    assert session.generate(max_new_tokens=missing + 5).token_ids[:missing] == want[len(want) - missing :]
    assert_in_step(session)
    assert session.fork().generate(max_new_tokens=5).token_ids == plain(target, session.token_ids, 5)


def test_bad_arguments_change_nothing():
    session, target, _ = make_session()
    with pytest.raises(ValueError, match="input_ids: expected a prompt, as the session has no text yet, got none"):
        session.generate(max_new_tokens=3)
    session.generate(make_prompt(4), max_new_tokens=5)
    text = list(session.token_ids)
    for arguments, message in (
        ({"input_ids": torch.tensor([[VOCABULARY]])}, "input_ids: expected token ids in 0..96"),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"input_ids: expected one prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number of at least 1, below .*, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            session.generate(**{"input_ids": make_prompt(3), "max_new_tokens": 4} | arguments)
        assert session.token_ids == text
    for tokens in (-1, len(text) + 1, 2.0, True):
        with pytest.raises(ValueError, match=rf"tokens: expected a whole number in 0..{len(text)}, got {tokens}"):
            session.rewind(tokens)
    assert session.generate(max_new_tokens=5).token_ids == plain(target, text, 5)


def test_calls_from_within_a_call_are_refused():
    session, target, _ = make_session()
    refused = []

    def on_tokens(_):
        for call in (lambda: session.generate(max_new_tokens=3), lambda: session.rewind(2), session.fork):
            with pytest.raises(RuntimeError, match="this session is decoding"):
                call()
            refused.append(1)

    want = plain(target, make_prompt(5)[0].tolist(), 12)
    assert session.generate(make_prompt(5), max_new_tokens=12, on_tokens=on_tokens).token_ids == want and len(refused) >= 9


def test_keeps_one_hidden_state_a_token():
    session, _, drafter = make_session()
    session.generate(make_prompt(5), max_new_tokens=40)
    kept = sum(features.untyped_storage().nbytes() for features in session._features)
    assert kept == (len(session.token_ids) - 1) * drafter.config.hidden_size * 4


def test_a_target_with_a_sliding_window_goes_back_too():
    """generate lets its cache forget what left the window; a session must not, and gives the same."""
    target, drafter = make_target("Mistral", 2, sliding_window=7), make_drafter()
    assert not Decoder(target, drafter).target.rewinds
    session = Session(target, drafter, block_size=4, stop_token_ids=())
    session.generate(make_prompt(20, 2), max_new_tokens=20)
    assert session.token_ids[20:] == plain(target, session.token_ids[:20], 20)
    for keep in (33, 12, 5):
        session.rewind(keep)
        fork, text = session.fork(), list(session.token_ids)
        assert (
            session.generate(max_new_tokens=10).token_ids
            == fork.generate(max_new_tokens=10).token_ids
            == plain(target, text, 10)
        )
