"""A text that goes on turn by turn, for chat: target and drafter read every token once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .decoding import Decoder, GenerationResult, Stopwatch, Text, argument_error, check_prompt, is_whole
from .drafter import DFlashDraftModel
from .sampling import Sampling
from .target import Target


class Session:
    """A text, and what target and drafter know of it. Arguments are those of `generate`.

        session = Session(target, drafter)
        session.generate(first_turn, max_new_tokens=200)
        session.generate(next_turn, max_new_tokens=200)     # reads the new turn only

    token_ids  the whole text so far, prompts and answers.

    Whatever is done to a session, its next tokens are those of `generate` on its whole text. After an error or an interrupt
    it is still usable: `token_ids` has what was certain by then, and the next call mends the rest. Forking and going back
    take a target of full and sliding attention only. It keeps what the drafter needs to go back: one hidden state a token.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlashDraftModel,
        *,
        block_size: int | None = None,
        sampling: Sampling | None = None,
        stop_token_ids: Iterable[int] | None = None,
        compile: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {"block_size": block_size, "sampling": sampling, "compile": compile}
        with torch.inference_mode():
            self._decoder = Decoder(target, drafter, stop_token_ids=stop_token_ids, rewinds=True, **self._options)
        self.token_ids: list[int] = []
        self._features: list[Tensor] = []  # of every token that was read, [1, n, hidden] each
        self._torn = False  # an error or interrupt came while target and drafter were out of step
        self._decoding = False

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        max_new_tokens: int,
        on_tokens: Callable[[list[int]], Any] | None = None,
        profile: bool = False,
    ) -> GenerationResult:
        """Adds `input_ids` [1, N] to the text, if given, and the target's continuation of it."""
        decoder = self._decoder
        if input_ids is not None:
            check_prompt(decoder.target.model, input_ids, "input_ids")
        elif not self.token_ids:
            raise argument_error("input_ids", "a prompt, as the session has no text yet", "none")
        self._mend()
        unread = self.token_ids[decoder.target.lengths[0] :] + ([] if input_ids is None else input_ids[0].tolist())
        text = Text(decoder.stops, decoder.block_size, len(unread), max_new_tokens, on_tokens)
        watch = Stopwatch(decoder.device if profile else None)
        watch.start(text.stats)

        self._torn = self._decoding = True
        try:
            if input_ids is not None:
                self.token_ids += input_ids[0].tolist()
            self._decode(unread, text, watch)
        finally:
            self._decoding = False
        self._torn = False
        return text.result()

    def _decode(self, unread: list[int], text: Text, watch: Stopwatch) -> None:
        decoder = self._decoder
        if len(unread) == 1 and decoder.target.lengths[0]:
            decoder.anchors.fill_(unread[0])
            decoder.remaining.fill_(text.remaining)
        else:
            ids = torch.tensor([unread], device=decoder.device)
            first = decoder.prefill(0, ids, text.remaining, watch, self._features)
            self.token_ids.append(first)
            text.add([first])
            watch.lap("prefill")
        while not text.finish_reason:
            (new,) = decoder.round(text.remaining, watch)
            assert decoder.features is not None
            self._features.append(decoder.features[:, : len(new)].clone())  # without the rows of rejected drafts
            self.token_ids += new
            text.stats.acceptance_lengths.append(text.add(new))
            watch.lap("other")

    @torch.inference_mode()
    def rewind(self, tokens: int) -> None:
        """Keeps the first `tokens` of the text, 0..len(token_ids), and forgets the rest."""
        if not is_whole(tokens) or not 0 <= tokens <= len(self.token_ids):
            raise argument_error("tokens", f"a whole number in 0..{len(self.token_ids)}", tokens)
        self._mend()
        if tokens == len(self.token_ids):
            return
        self._decoder.target.rewind(0, min(self._decoder.target.lengths[0], max(0, tokens - 1)))
        self._torn = True
        del self.token_ids[tokens:]
        self._mend()

    @torch.inference_mode()
    def fork(self) -> "Session":
        """A session with a copy of this text, which goes on by itself."""
        self._mend()
        decoder = self._decoder
        other = Session(decoder.target.model, decoder.drafter, stop_token_ids=decoder.stops, **self._options)
        other._decoder.target = decoder.target.fork()
        other._decoder.cache.restore(decoder.cache.snapshot())
        other.token_ids, other._features = list(self.token_ids), list(self._features)
        return other

    def _mend(self) -> None:
        """Brings target and drafter back in step with the text, if something came between."""
        if self._decoding:
            raise RuntimeError("this session is decoding: on_tokens, or another thread, must wait for it to end")
        if not self._torn:
            return
        decoder = self._decoder
        if not decoder.target.rewinds:
            raise RuntimeError("this session was interrupted, and its target cannot go back in a text: start a new session")
        features = torch.cat(self._features, 1) if self._features else torch.empty(1, 0, 0)
        read = min(decoder.target.lengths[0], features.shape[1], max(0, len(self.token_ids) - 1))
        decoder.target.rewind(0, read)
        decoder.cache.reset()
        self._features = [features[:, :read]] if read else []
        if read:
            decoder.drafter.prefill_context(decoder.cache, self._features[0])
        self._torn = False
